"""Server-Sent Events of jobs: what a log entry looks like on the wire, and the cursor that takes a stream up again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from api.logprobs import token_logprobs
from tasks.codes import CarpoolError
from tasks.entries import Entry
from tasks.ledger_types import JobState

#: More children than this in one stream would be hard on everyone: follow them one by one.
MAX_STREAM_CHILDREN: Final = 16

_CURSOR: Final = re.compile(r"(?P<n>[0-9]{1,10})(?P<end>\.end)?")
_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Cursor:
    """How far a client is in one job: `n` tokens, and whether it has the end. Written `<n>` or `<n>.end`."""

    n: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.n}.end" if self.ended else str(self.n)


def parse_cursor(text: str, num_jobs: int) -> list[Cursor]:
    """The cursors of the jobs of a stream, joined with commas as its event ids are; "" is the beginning.

    Raises:
        CarpoolError: "bad_cursor".
    """
    if not text.strip():
        return [Cursor() for _ in range(num_jobs)]
    matches = [_CURSOR.fullmatch(part) for part in text.strip().split(",")]
    found = [Cursor(int(match["n"]), match["end"] is not None) for match in matches if match is not None]
    if len(found) != len(matches) or len(found) != num_jobs:
        form = (
            "a number of tokens, as in 17, or 17.end"
            if num_jobs == 1
            else f"{num_jobs} numbers of tokens, as in 3,17.end"
        )
        raise CarpoolError(
            "bad_cursor",
            f"{text[:80]!r} is no cursor of this stream: it is {form}. Send the id of the last event that you have",
            param="starting_after",
        )
    return found


class Renderer(Protocol):
    """What the events of a stream look like on the wire: each endpoint has a dialect of its own."""

    def begin(self) -> str:
        """What comes before the first event; "" for nothing."""

    def render(self, index: int, entry: Entry) -> str:
        """The events of a token entry or an end of job number `index`."""

    def fault(self, error: CarpoolError) -> str:
        """A fault of the stream itself, not of the job; nothing follows."""

    def finish(self) -> str:
        """What comes after the ends of all jobs; "" for nothing."""


class EventRenderer:
    """Renders entries of one job, or of the children of a group, as events.

    A token is an event of its own: `data: {"token", "sequence_id", "n"}` with the cursor as its id, and with `logprobs`
    where they were asked for. The end adds `finish_reason`, `usage`, `status` and `error`; its token is the tail of the
    text and may be empty.
    """

    def __init__(self, ids: Sequence[str], cursors: Sequence[Cursor]) -> None:
        self._ids = [_to_json(id) for id in ids]
        self._cursors = list(cursors)

    def render(self, index: int, entry: Entry) -> str:
        """The events of a token entry or an end of job number `index`."""
        return self._end(index, entry) if entry.kind == "end" else self._tokens(index, entry)

    def begin(self) -> str:
        return ""

    def fault(self, error: CarpoolError) -> str:
        return render_error(error)

    def finish(self) -> str:
        return ""

    def _event_id(self) -> str:
        return ",".join(map(str, self._cursors))

    def _tokens(self, index: int, entry: Entry) -> str:
        cursor, sequence_id = self._cursors[index], self._ids[index]
        events = []
        for position, token in enumerate(entry.text):
            cursor.n = n = entry.first + position
            more = f',"logprobs":{_to_json(token_logprobs(entry.lp[position]))}' if entry.lp else ""
            events.append(
                f"id: {self._event_id()}\n"
                f'data: {{"token":{_to_json(token)},"sequence_id":{sequence_id},"n":{n}{more}}}\n\n'
            )
        return "".join(events)

    def _end(self, index: int, entry: Entry) -> str:
        cursor = self._cursors[index]
        cursor.n, cursor.ended = entry.n, True
        rest = _to_json(
            {
                "n": entry.n,
                "finish_reason": entry.finish_reason,
                "usage": entry.usage,
                "status": entry.status,
                "error": entry.error,
            }
        )
        token = _to_json("".join(entry.text))
        return f'id: {self._event_id()}\ndata: {{"token":{token},"sequence_id":{self._ids[index]},{rest[1:]}\n\n'


def render_error(error: CarpoolError) -> str:
    """A fault of the stream itself, not of the job: no id, so that the client comes back to where it was."""
    return f"data: {_to_json({'error': error.body()})}\n\n"


def render_comment(text: str) -> str:
    """A comment, which clients pass over."""
    return f": {text}\n\n"


def describe(states: Sequence[JobState | None]) -> str:
    """What is true of the jobs of a silent stream, in plain words."""
    if len(states) == 1:
        return _describe(states[0])
    words = [_describe(state) for state in states]
    return "; ".join(f"{index}: {text}" for index, text in enumerate(words))


def _describe(state: JobState | None) -> str:
    if state is None:
        return "gone"
    if state.status == "queued":
        place = f"queued at position {state.position}" if state.position else "queued"
        if not state.has_worker:
            return f"{place}, no worker is ready"
        return place if state.eta_ms is None else f"{place}, done in about {state.eta_ms / 1000:.0f} s"
    if state.status == "running":
        if state.lease_ms < 0:
            return f"stalled, its worker's lease ran out {-state.lease_ms / 1000:.0f} s ago"
        return f"riding, {state.k} token{'' if state.k == 1 else 's'}"
    return state.status


def as_json(value: Any) -> str:
    """Compact JSON, characters as they are."""
    return _to_json(value)
