"""What the events of a stream say: how many tokens came when, and how it ended."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any, Final

from ops.bench.http_client import DONE

#: Fields of a chat's delta that hold what a model wrote.
_WRITTEN: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


class StreamReader:
    """Takes the events of one request in their order. A subclass knows the form.

    Attributes:
        arrivals: when each event with tokens came, as of `time.perf_counter`.
        tokens, prompt_tokens: as the server says; None where it does not.
        is_whole: the answer's end was seen.
        error: code of what the server reported in the stream, "" for nothing; `message` its words.
    """

    def __init__(self) -> None:
        self.arrivals = array("d")
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.is_whole = False
        self.error = ""
        self.message = ""

    def take(self, data: bytes, at: float) -> None:
        """One event's data, and when it came. What is no JSON object is an error of the stream."""
        if data == DONE:
            self.is_whole = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):  # text that is no UTF-8, or brackets without an end
            event = None
        if not isinstance(event, dict):
            self.fail("bad_event", f"an event that is no JSON object: {data[:80]!r}")
            return
        try:
            if event.get("error"):
                self._take_error(event["error"])
            else:
                self._take(event, at)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            # whatever a stranger's server puts where the format has something else
            self.fail("bad_event", f"an event that cannot be understood: {data[:80]!r}")

    def fail(self, code: str, message: str) -> None:
        """The first error counts."""
        self.error = self.error or code
        self.message = self.message or message

    def _take(self, event: Mapping[str, Any], at: float) -> None:
        raise NotImplementedError

    def _take_error(self, error: Any) -> None:
        if isinstance(error, dict):
            code = str(error.get("code") or error.get("type") or "error")
            self.fail(code, str(error.get("message", "")))
        else:
            self.fail("error", str(error))

    def _take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            self.tokens = int(usage["completion_tokens"])
            prompt = usage.get("prompt_tokens")
            self.prompt_tokens = None if prompt is None else int(prompt)


class JobReader(StreamReader):
    """Carpool's own events. A token that was seen before a stream was taken up again is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self._have = 0

    def _take(self, event: Mapping[str, Any], at: float) -> None:
        n, reason = int(event["n"]), event.get("finish_reason")
        if n > self._have or (reason and event.get("token")):
            self.arrivals.append(at)
        self._have = max(self._have, n)
        self.tokens = self._have
        if reason:
            self._take_usage(event.get("usage"))
            self.is_whole = True
            if reason not in ("stop", "length", "tool_calls"):
                self.fail(str(reason), f"the job was ended: {reason}")


class OpenAIReader(StreamReader):
    """Chunks of `/v1/completions` and `/v1/chat/completions`, whoever sends them."""

    def _take(self, event: Mapping[str, Any], at: float) -> None:
        has_text = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            has_text = has_text or bool(choice.get("text") or any(delta.get(name) for name in _WRITTEN))
            self.is_whole = self.is_whole or bool(choice.get("finish_reason"))
        if has_text:
            self.arrivals.append(at)
        self._take_usage(event.get("usage"))
