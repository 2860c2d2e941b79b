"""What a person does on the page at `/`, found as a person finds it: by names and labels."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser import BOUND_S, Visitor
from tests.openai_clients import chat_text

#: What Chromium says of its own on the console when a server is away.
AWAY = r"Failed to load resource: net::ERR_|Failed to load resource: .*status of 503"


class Playground:
    """The page in one tab."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.prompt = page.get_by_role("textbox", name="Your message")
        self.stop = page.get_by_role("button", name="Stop", exact=True)
        self.answer = page.locator(".turn.assistant").last
        self.words = self.answer.locator(".words")
        self.batch = page.get_by_role("region", name="Riding now")
        self.jobs = page.get_by_role("region", name="Jobs")
        self.error = page.get_by_role("alert")

    @classmethod
    def of(cls, visitor: Visitor, path: str = "/") -> Playground:
        """A new tab with the page."""
        return cls(visitor.open(path))

    def set(self, **parameters: Any) -> None:
        """Fill in parameters, by their names in the API."""
        if self.page.locator("#parameters").get_attribute("open") is None:
            self.page.get_by_text("Parameters", exact=False).first.click()
        for name, value in parameters.items():
            field = self.page.locator(f"#parameter-form [name={name}]")
            if name == "priority":
                field.select_option(str(value))
            else:
                field.fill(str(value))

    def send(self, text: str) -> None:
        self.prompt.fill(text)
        self.page.get_by_role("button", name="Send", exact=True).click()

    def mode(self, name: str) -> None:
        """Chat or Prompt."""
        self.page.get_by_role("radio", name=name).check()

    def fact(self, kind: str) -> Locator:
        return self.answer.locator(f"[data-fact={kind}]")

    def wait_for_status(self, status: str, seconds: float = BOUND_S) -> None:
        expect(self.answer).to_have_attribute("data-status", status, timeout=seconds * 1000)

    def wait_for_tokens(self, at_least: int, seconds: float = BOUND_S) -> int:
        """Until so many are shown; returns how many are."""
        numbers = "|".join(["[1-9]\\d{3}", "[1-9]\\d{2}", *(str(n) for n in range(at_least, 100))])
        expect(self.fact("tokens")).to_have_text(re.compile(rf"^({numbers}) tokens?$"), timeout=seconds * 1000)
        return int(self.fact("tokens").inner_text().split()[0])

    def job(self) -> str:
        """Id of the job that the address names."""
        return str(self.page.evaluate("new URLSearchParams(location.hash.slice(1)).get('job')"))


def shown(text: str) -> str:
    """A completion as the page shows it: without the space before its first word."""
    return text.lstrip()


def chat_answer(text: str, seed: int, tokens: int) -> str:
    """The simulated engine's answer to a first message, as the page shows it."""
    return shown(chat_text([("user", text)], seed, tokens))
