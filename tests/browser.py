"""A real headless Chromium for tests of what people see, and what no page of ours may do in it.

playwright's own loop counts as running in the thread that started it, so a module with such tests has no async ones.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.missing import give_up

BOUND_S: Final = 20.0
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS: Final = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # nothing but this machine has an address, whatever a page asks for
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_chromium() -> str:
    """Path of the browser; without one the test is skipped, or fails in CI."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is not None:
        return found
    return give_up("no Chromium is installed (Debian: apt-get install --no-install-recommends chromium fonts-noto-cjk)")


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser; when the block ends, it and all its processes have ended."""
    path = find_chromium()
    before = set(psutil.Process().children())
    with sync_playwright() as playwright:
        drivers = [process for process in psutil.Process().children() if process not in before]
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS), timeout=BOUND_S * 1000)
        try:
            yield browser
        finally:
            processes = [process for driver in drivers for process in (driver, *driver.children(recursive=True))]
            browser.close()
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    for process in alive:
        process.kill()
    assert not alive, f"the browser left processes behind: {alive}"


expect.set_options(timeout=BOUND_S * 1000)


class Visitor:
    """One person with a browser of their own: cookies and storage are shared by its pages and with nobody else.

    Attributes:
        faults: what pages did that none may do: errors, and requests to any host but ours.
    """

    def __init__(self, context: BrowserContext, origin: str, expected: Sequence[str]) -> None:
        self.context = context
        self.origin = origin
        self.faults: list[str] = []
        self._expected = [re.compile(pattern) for pattern in expected]
        context.set_default_timeout(BOUND_S * 1000)
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self._fault(f"error: {error.error}"))
        context.on("request", self._on_request)

    def open(self, path: str = "/") -> Page:
        """A new tab that shows a page of ours."""
        page = self.context.new_page()
        page.goto(f"{self.origin}{path}")
        return page

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._fault(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_request(self, request: Request) -> None:
        url = request.url
        if url != self.origin and not url.startswith((f"{self.origin}/", "data:", "blob:", "about:")):
            self._fault(f"request to another host: {url}")

    def _fault(self, text: str) -> None:
        if not any(pattern.search(text) for pattern in self._expected):
            self.faults.append(text)


@contextmanager
def visiting(browser: Browser, origin: str, *, expected: Sequence[str] = (), **options: Any) -> Iterator[Visitor]:
    """A visitor of a server of ours; the block must end without a fault of its pages.

    Args:
        origin: `http://127.0.0.1:<port>`.
        expected: patterns of faults that the test provokes: of a server that it stops, say.
        options: of playwright's `new_context`: viewport, color_scheme, reduced_motion and others.
    """
    context = browser.new_context(**options)
    try:
        visitor = Visitor(context, origin, expected)
        yield visitor
    finally:
        context.close()
    if visitor.faults:
        raise AssertionError("\n".join(visitor.faults))


def screenshot(page: Page, path: Path, *, full_page: bool = False) -> bytes:
    """A picture of the page as it is, animations at their ends, written to a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return page.screenshot(path=path, full_page=full_page, animations="disabled")
