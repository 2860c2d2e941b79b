"""That the browser of the tests is a real one, and notices what no page may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.api_server import ApiServer
from tests.browser import find_chromium, visiting

#: A browser asks for it where a page names none, as answers in JSON do.
NO_ICON = r"404.*/favicon\.ico"


def test_a_page_of_ours_opens_without_a_fault(chromium: Browser, simulated_api: ApiServer) -> None:
    with visiting(chromium, simulated_api.url, expected=[NO_ICON]) as visitor:
        page = visitor.open("/health/live")
        assert "live" in page.inner_text("body")


def test_two_visitors_share_nothing(chromium: Browser, simulated_api: ApiServer) -> None:
    with (
        visiting(chromium, simulated_api.url, expected=[NO_ICON]) as one,
        visiting(chromium, simulated_api.url, expected=[NO_ICON]) as other,
    ):
        one.open("/health/live").evaluate("localStorage.setItem('mark', '1')")
        assert one.open("/health/live").evaluate("localStorage.getItem('mark')") == "1"
        assert other.open("/health/live").evaluate("localStorage.getItem('mark')") is None


@pytest.mark.parametrize(
    ("script", "event", "told"),
    [
        ("setTimeout(() => { throw new Error('broken') })", "pageerror", "error: .*broken"),
        ("console.error('broken')", "console", "console error: broken"),
        ("fetch('/nothing')", "console", "console error: Failed to load resource.*404"),
        (
            "fetch('http://example.com/').catch(() => null)",
            "requestfailed",
            "request to another host: http://example.com/",
        ),
    ],
)
def test_a_fault_of_a_page_is_noticed(
    chromium: Browser, simulated_api: ApiServer, script: str, event: Any, told: str
) -> None:
    def visit() -> None:
        with visiting(chromium, simulated_api.url, expected=[NO_ICON]) as visitor:
            page = visitor.open("/health/live")
            with page.expect_event(event):
                page.evaluate(f"() => {{ {script} }}")

    with pytest.raises(AssertionError, match=told):
        visit()


def test_what_a_test_provokes_is_no_fault(chromium: Browser, simulated_api: ApiServer) -> None:
    with visiting(chromium, simulated_api.url, expected=[NO_ICON, r"status of 404.*/nothing\)"]) as visitor:
        visitor.open("/health/live").evaluate("fetch('/nothing').then((answer) => answer.status)")


def test_a_machine_without_a_browser_skips_and_ci_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium is installed"):
        find_chromium()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        find_chromium()
