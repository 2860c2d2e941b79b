"""Takes the documents' pictures of the page, with the bundled model: `python -m tests.playground_pictures`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, expect

from tests.api_server import ApiServer, running_api
from tests.browser import running_chromium, screenshot, visiting
from tests.playground import Playground
from tests.redis_server import RedisServer
from tests.service import ROOT, Service

FOLDER: Final = ROOT / "docs" / "images"
_BOUND_S: Final = 90.0
#: The titles of those who ride along.
_OTHERS: Final = (
    "Write a story about a lighthouse keeper.",
    "Explain how bread rises.",
    "What do bees do in winter?",
    "Describe a train ride through the mountains.",
    "Give me a recipe for pancakes.",
)
_PICTURES: Final[dict[str, dict[str, Any]]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1180, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1180, "height": 800}},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "device_scale_factor": 1.5},
}


def _submit(api: ApiServer, title: str) -> str:
    body = {"messages": [{"role": "user", "content": title}], "max_tokens": 400, "metadata": {"title": title}}
    with api.client() as client:
        return str(client.post("/jobs", json=body).json()["id"])


def _take(chromium: Browser, service: Service, api: ApiServer, name: str) -> None:
    with visiting(chromium, api.url, **_PICTURES[name]) as visitor:
        page = Playground.of(visitor)
        page.set(temperature=0.4, seed=7, max_tokens=160)
        page.page.locator("#parameters summary").click()
        others = [_submit(api, title) for title in _OTHERS[:3]]
        page.send("Tell me of the sea.")
        page.wait_for_tokens(1, _BOUND_S)
        others += [_submit(api, title) for title in _OTHERS[3:]]
        page.wait_for_tokens(70, _BOUND_S)
        expect(page.batch.locator(".seat.own")).to_have_count(1)
        page.page.evaluate("scrollTo(0, 0)")
        screenshot(page.page, FOLDER / f"playground-{name}.png")
        page.page.keyboard.press("Escape")
        page.wait_for_status("cancelled")
        for id in others:
            service.cancel(id)
            service.wait_for_end(id)


def main() -> None:
    """Entry point."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder) / "redis") as server,
        Service(server.url, Path(folder), engine="transformers", dtype="float32", device="cpu") as service,
    ):
        service.worker(ready_s=300)
        with running_api(service.settings) as api, running_chromium() as chromium:
            for name in _PICTURES:
                _take(chromium, service, api, name)


if __name__ == "__main__":
    main()
