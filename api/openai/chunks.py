"""Streams of `/v1/completions` and `/v1/chat/completions`: a job's log as OpenAI's chunks.

Each chunk's event id is the cursor of `/jobs/{id}/stream`, so that a stream that was cut can be taken up there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.errors import error_of_job
from api.events import Cursor, as_json, render_error
from api.logprobs import LegacyLogprobs, chat_logprobs
from api.openai.message import MessageFold
from tasks.codes import CarpoolError
from tasks.entries import Entry, TokenLogprob

DONE = "data: [DONE]\n\n"


def sum_usage(usages: Sequence[Mapping[str, Any]], copies: int) -> dict[str, Any]:
    """The usage of several jobs; a prompt that `copies` jobs share is counted once."""
    prompt = sum(usage["prompt_tokens"] or 0 for usage in usages[::copies])
    cached = sum(cached_tokens(usage) for usage in usages[::copies])
    completion = sum(usage["completion_tokens"] for usage in usages)
    total: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return total | ({"prompt_tokens_details": {"cached_tokens": cached}} if cached else {})


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Tokens of a job's prompt that needed no prefill."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


class Chunks:
    """Renders the entries of the jobs that are an answer's choices. A subclass says what a choice looks like.

    Args:
        ids: the jobs, in the order of the choices.
        head: what every chunk begins with: id, object, created, model.
        copies: so many jobs in a row share a prompt.
    """

    def __init__(self, ids: Sequence[str], head: Mapping[str, Any], copies: int, include_usage: bool) -> None:
        self._cursors = [Cursor() for _ in ids]
        self._usages: list[Mapping[str, Any]] = [{}] * len(ids)
        self._head = as_json(head)[:-1]
        self._copies = copies
        self._include_usage = include_usage
        self._failed = False

    def first_choices(self) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that come before any token."""
        raise NotImplementedError

    def token_choice(self, index: int, text: str, lp: TokenLogprob | None) -> dict[str, Any] | None:
        """The choice of a token's chunk; None where there is nothing to say yet."""
        raise NotImplementedError

    def last_choices(self, index: int, tail: str, reason: str | None) -> Iterator[dict[str, Any]]:
        """Choices of the chunks at the end of a job that succeeded; the last one has the finish_reason."""
        raise NotImplementedError

    def begin(self) -> str:
        return "".join(self._event(choice, "") for choice in self.first_choices())

    def render(self, index: int, entry: Entry) -> str:
        return self._end(index, entry) if entry.kind == "end" else self._tokens(index, entry)

    def fault(self, error: CarpoolError) -> str:
        return render_error(error)

    def finish(self) -> str:
        if self._failed:
            return ""
        usage = sum_usage(self._usages, self._copies) if self._include_usage else None
        return (f'data: {self._head},"choices":[],"usage":{as_json(usage)}}}\n\n' if usage else "") + DONE

    def _tokens(self, index: int, entry: Entry) -> str:
        cursor, events = self._cursors[index], []
        for position, text in enumerate(entry.text):
            cursor.n = entry.first + position
            choice = self.token_choice(index, text, entry.lp[position] if entry.lp else None)
            if choice is not None:
                events.append(self._event(choice))
        return "".join(events)

    def _end(self, index: int, entry: Entry) -> str:
        cursor = self._cursors[index]
        self._usages[index] = entry.usage or {"prompt_tokens": 0, "completion_tokens": entry.n}
        if entry.status != "succeeded":
            self._failed = True
            cursor.n, cursor.ended = entry.n, True
            error = error_of_job("", str(entry.status), entry.error)
            return f"id: {self._event_id()}\n{render_error(error)}"
        *choices, last = self.last_choices(index, "".join(entry.text), entry.finish_reason)
        # what comes before the last chunk has no id: a client that was cut between them gets the end again
        events = [self._event(choice, "") for choice in choices]
        cursor.n, cursor.ended = entry.n, True
        return "".join([*events, self._event(last)])

    def _event_id(self) -> str:
        return ",".join(map(str, self._cursors))

    def _event(self, choice: Mapping[str, Any], id: str | None = None) -> str:
        event_id = self._event_id() if id is None else id
        line = f"id: {event_id}\n" if event_id else ""
        usage = ',"usage":null' if self._include_usage else ""
        return f'{line}data: {self._head},"choices":[{as_json(choice)}]{usage}}}\n\n'


class CompletionChunks(Chunks):
    """Chunks of `/v1/completions`.

    Args:
        echo: the prompt of each job, to come first; none where that was not asked for.
    """

    def __init__(
        self,
        ids: Sequence[str],
        head: Mapping[str, Any],
        copies: int,
        include_usage: bool,
        *,
        echo: Sequence[str],
        logprobs: bool,
    ) -> None:
        super().__init__(ids, head, copies, include_usage)
        self._echo = echo
        self._logprobs = [LegacyLogprobs() for _ in ids] if logprobs else []

    def first_choices(self) -> Iterator[dict[str, Any]]:
        for index, prompt in enumerate(self._echo):
            yield self._choice(index, prompt)

    def token_choice(self, index: int, text: str, lp: TokenLogprob | None) -> dict[str, Any] | None:
        if not text and not self._logprobs:
            return None
        logprobs = self._logprobs[index].take([lp]) if self._logprobs and lp is not None else None
        return self._choice(index, text, logprobs)

    def last_choices(self, index: int, tail: str, reason: str | None) -> Iterator[dict[str, Any]]:
        yield self._choice(index, tail, reason=reason)

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatChunks(Chunks):
    """Chunks of `/v1/chat/completions`."""

    def __init__(
        self,
        ids: Sequence[str],
        head: Mapping[str, Any],
        copies: int,
        include_usage: bool,
        *,
        uses_tools: bool,
        logprobs: bool,
    ) -> None:
        super().__init__(ids, head, copies, include_usage)
        self._folds = [MessageFold(id, uses_tools) for id in ids]
        self._logprobs = logprobs

    def first_choices(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._folds)):
            yield self._choice(index, {"role": "assistant", "content": ""})

    def token_choice(self, index: int, text: str, lp: TokenLogprob | None) -> dict[str, Any] | None:
        fold = self._folds[index]
        delta = fold.delta(fold.feed(text))
        if self._logprobs and lp is not None:
            return self._choice(index, delta or {"content": ""}, chat_logprobs([lp]))
        return self._choice(index, delta) if delta else None

    def last_choices(self, index: int, tail: str, reason: str | None) -> Iterator[dict[str, Any]]:
        fold = self._folds[index]
        delta = fold.delta([*fold.feed(tail), *fold.finish()])
        if delta:
            yield self._choice(index, delta)
        yield self._choice(index, {}, reason=fold.finish_reason(reason))

    def _choice(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
