"""The stream of a response: its job's log as OpenAI's events, each with a sequence number.

The number of an event follows from the log alone: it is counted from the job's first token whichever replica sends it,
so a client comes back with the number of the last event that it has, on any replica, for as long as the job is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from api.events import as_json
from api.openai.response_object import Stored, ending
from api.openai.response_output import Event, OutputFold
from tasks.codes import CarpoolError
from tasks.entries import Entry


class ResponseEvents:
    """Renders the entries of the job from its first on, and leaves out what the client has.

    Args:
        after: number of the last event that the client has; -1: none.
    """

    def __init__(self, stored: Stored, after: int = -1) -> None:
        self._begun = stored.begun()
        self._fold = OutputFold(stored.view["id"], stored.uses_tools)
        self._after = after
        self._next = 0

    def begin(self) -> str:
        return self._numbered(
            [
                {"type": "response.created", "response": self._begun},
                {"type": "response.in_progress", "response": self._begun},
            ]
        )

    def render(self, index: int, entry: Entry) -> str:
        if entry.kind == "end":
            return self._end(entry)
        return "".join(self._numbered(self._fold.feed(text)) for text in entry.text if text)

    def fault(self, error: CarpoolError) -> str:
        body = error.body()
        event = {
            "type": "error",
            "code": body["code"],
            "message": body["message"],
            "param": body["param"],
            "sequence_number": self._next,
            # what has the clients raise
            "error": body,
        }
        return f"event: error\ndata: {as_json(event)}\n\n"

    def finish(self) -> str:
        return ""

    def _end(self, entry: Entry) -> str:
        status = str(entry.status)
        complete = status == "succeeded" and entry.finish_reason == "stop"
        events = self._fold.finish("".join(entry.text), complete=complete)
        end: Mapping[str, Any] = ending(status, entry.finish_reason, entry.usage, entry.error)
        response = {**self._begun, **end, "output": self._fold.items}
        return self._numbered([*events, {"type": f"response.{end['status']}", "response": response}])

    def _numbered(self, events: Iterable[Event]) -> str:
        rendered = []
        for event in events:
            number, self._next = self._next, self._next + 1
            if number > self._after:
                data = as_json({**event, "sequence_number": number})
                rendered.append(f"event: {event['type']}\nid: {number}\ndata: {data}\n\n")
        return "".join(rendered)
