"""The page for everybody: with the keyboard alone, on a phone, light and dark, and for those who listen to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.api_server import ApiServer, running_api
from tests.browser import visiting
from tests.playground import Playground
from tests.redis_server import RedisServer
from tests.service import Service

PHONE = {"width": 360, "height": 740}
#: Contrast of every text on the screen with what is behind it (WCAG 2.2, 1.4.3): [text, ratio] of those below 4.5.
CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const found = channels(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
      if (getComputedStyle(one).backgroundImage !== "none") return null;
    }
    return [255, 255, 255];
  };
  const poor = [];
  let seen = 0;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".unseen, :disabled, option")) continue;
    const ground = behind(element);
    if (!ground) continue;
    seen += 1;
    const [high, low] = [light(channels(getComputedStyle(element).color)), light(ground)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push([texts.currentNode.data.trim().slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return { poor, seen };
}"""
#: What can be scrolled sideways, but for code, which is as wide as it is.
SIDEWAYS = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.checkVisibility() && !one.matches("pre, .unseen, .job-title"))
  .filter((one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX) && one.scrollWidth > one.clientWidth)
  .map((one) => `${one.id} ${one.className}`)"""
#: Controls without a name, ids that are there twice, labels and references that lead nowhere.
FLAWS = """() => {
  const flaws = [];
  for (const one of document.querySelectorAll("button, input, select, textarea, summary, [role=region]")) {
    const named = one.getAttribute("aria-label") || one.labels?.[0]?.textContent.trim() || one.textContent.trim();
    if (!named) flaws.push(`no name: ${one.outerHTML.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  for (const id of new Set(ids)) if (ids.filter((one) => one === id).length > 1) flaws.push(`twice: ${id}`);
  for (const name of ["for", "aria-labelledby", "aria-describedby", "aria-controls"])
    for (const one of document.querySelectorAll(`[${name}]`))
      if (!document.getElementById(one.getAttribute(name))) flaws.push(`nothing at ${name}=${one.getAttribute(name)}`);
  return flaws;
}"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("looks")
    with RedisServer(folder / "redis") as server, Service(server.url, folder, simulated_step_ms=30) as service:
        service.worker()
        yield service


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def fill(page: Playground, service: Service) -> list[str]:
    """Bring everything onto the screen: a full car, a queue, an answer under way, a job that failed, open folds."""
    service.wait_for_end(service.submit("Broken [[raise]]@1", metadata={"title": "x" * 200}))
    others = [service.submit(f"other {n}", max_tokens=3000) for n in range(5)]
    page.set(max_tokens=300)
    page.send("A word that does not end: " + "abcdefghij" * 30)
    page.page.get_by_text("The same as code").click()
    expect(page.batch.locator(".person")).to_have_count(2)
    page.jobs.get_by_role("button", name="x" * 200).first.click()
    expect(page.jobs.locator(".problem")).to_be_visible()
    return others


def tidy(service: Service, others: list[str], page: Playground) -> None:
    page.page.keyboard.press("Escape")
    page.wait_for_status("cancelled")
    for id in others:
        service.cancel(id)
        service.wait_for_end(id)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, {"width": 1240, "height": 900}], ids=["phone", "desk"])
def test_nothing_overflows_and_every_text_can_be_read(
    chromium: Browser, api: ApiServer, service: Service, scheme: str, size: dict[str, int]
) -> None:
    with visiting(chromium, api.url, color_scheme=scheme, viewport=size) as visitor:
        page = Playground.of(visitor)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        others = fill(page, service)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.page.evaluate(SIDEWAYS) == []
        found = page.page.evaluate(CONTRAST)
        assert found["seen"] > 40
        assert found["poor"] == []
        assert page.page.evaluate(FLAWS) == []
        tidy(service, others, page)


def test_the_theme_follows_the_system_until_one_is_chosen(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url, color_scheme="dark") as visitor:
        page = visitor.open()
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        dark = page.evaluate(ground)
        button = page.get_by_role("button", name="Theme: auto")
        button.click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
        assert page.evaluate(ground) == light
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name="Theme: light").click()
        assert page.evaluate(ground) == dark


def test_who_wants_no_motion_gets_none(chromium: Browser, api: ApiServer, service: Service) -> None:
    with visiting(chromium, api.url, reduced_motion="reduce") as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=200)
        page.send("Slowly")
        page.wait_for_tokens(2)
        expect(page.batch.locator(".moving")).to_have_count(1)
        assert page.page.evaluate("document.getAnimations().length") == 0
        page.page.emulate_media(reduced_motion="no-preference")
        assert page.page.evaluate("document.getAnimations().length") > 0
        tidy(service, [], page)


def focused(page: Playground) -> str:
    """What has the focus, as those who cannot see it are told."""
    return str(
        page.page.evaluate(
            "(() => { const one = document.activeElement;"
            "return (one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent).trim()"
            ".replace(/\\s+/g, ' ').slice(0, 40) })()"
        )
    )


def test_the_keyboard_alone_will_do(chromium: Browser, api: ApiServer, service: Service) -> None:
    with visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        press = page.page.keyboard.press
        press("Tab")
        assert focused(page) == "Skip to the prompt"
        press("Enter")
        expect(page.prompt).to_be_focused()
        page.page.keyboard.type("Only keys")
        press("Control+Enter")
        expect(page.stop).to_be_visible()
        expect(page.prompt).to_be_focused()
        page.wait_for_tokens(2)
        press("Escape")
        page.wait_for_status("cancelled")
        seen = []
        for _ in range(60):
            press("Tab")
            outline: Any = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            label = focused(page)
            seen.append(label)
            if label.startswith("Only keys"):
                break
            checked = page.page.evaluate("document.activeElement.matches('input[type=radio]')")
            assert checked or outline != "none", label
        press("Enter")
        row = page.jobs.get_by_role("listitem").filter(has_text="Only keys").first
        expect(row.locator(".job-text")).to_be_visible()
        press("Tab")
        assert focused(page) == "Text"
        press("Tab")
        assert focused(page) == "Delete"
        assert [label for label in seen if label.startswith("Parameters")]


def test_those_who_listen_are_told_states_and_not_each_token(
    chromium: Browser, api: ApiServer, service: Service
) -> None:
    with visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        for role, name in (("banner", None), ("main", None), ("region", "Playground"), ("region", "Riding now")):
            expect(page.page.get_by_role(role, name=name)).to_be_visible()  # type: ignore[arg-type]
        assert page.page.locator("html").get_attribute("lang") == "en"
        page.page.evaluate(
            "window.told = []; new MutationObserver(() => told.push(document.getElementById('say').textContent))"
            ".observe(document.getElementById('say'), { childList: true, characterData: true, subtree: true })"
        )
        page.set(max_tokens=30)
        page.send("Listen")
        page.wait_for_status("succeeded")
        told = page.page.evaluate("told")
        assert [text for text in told if not text.startswith("Waiting")] == [
            "Sent",
            "The answer comes",
            "Done: 30 tokens",
        ]
        assert page.page.locator("#stage").get_attribute("aria-live") is None
        assert page.page.locator("#stage").get_attribute("aria-busy") == "false"


def test_the_welcome_sends_what_it_suggests(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=3)
        page.page.get_by_role("button", name="Tell me of the sea.").click()
        page.wait_for_status("succeeded")
        expect(page.page.locator(".turn.user .words")).to_have_text("Tell me of the sea.")


def test_a_hidden_page_asks_for_nothing(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        expect(page.batch.get_by_text("worker-1")).to_be_visible()
        asked: list[str] = []
        _hide(page, hidden=True)
        visitor.context.on("request", lambda request: asked.append(request.url))
        # longer than any of its questions but that for the models takes to come again
        page.page.evaluate("new Promise((done) => setTimeout(done, 2500))")
        assert asked == []
        with page.page.expect_request(lambda request: request.url.endswith("/service")):
            _hide(page, hidden=False)


def _hide(page: Playground, *, hidden: bool) -> None:
    value = "true" if hidden else "false"
    page.page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{ value: {value}, configurable: true }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
