"""The output items of a response, and the events that tell how they come to be: a pure function of a job's text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from api.openai.message import MessageFold
from tasks.tool_calls import Piece, TextPiece, ToolCallStart

Event = dict[str, Any]


class OutputFold:
    """Puts the items together from the text that each token released.

    The same texts give the same events, so that a stream that is taken up on another replica goes on as it was.
    """

    def __init__(self, job_id: str, uses_tools: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._message = MessageFold(job_id, uses_tools)
        self._suffix = job_id.rpartition("_")[2]
        self._is_open = False

    def feed(self, text: str) -> list[Event]:
        """The events of the next text."""
        return list(self._events(self._message.feed(text)))

    def finish(self, tail: str, *, complete: bool) -> list[Event]:
        """The events of the rest, and of the end of the last item; there is always one, a text if nothing else."""
        events = list(self._events([*self._message.feed(tail), *self._message.finish()]))
        if not self.items:
            events += self._open_text()
        return events + self._close("completed" if complete else "incomplete")

    def _events(self, pieces: Iterable[Piece]) -> Iterable[Event]:
        for piece in pieces:
            if isinstance(piece, TextPiece):
                if not self._is_open or self.items[-1]["type"] != "message":
                    yield from self._close("completed")
                    yield from self._open_text()
                self.items[-1]["content"][0]["text"] += piece.text
                yield {
                    "type": "response.output_text.delta",
                    **self._place(),
                    "content_index": 0,
                    "delta": piece.text,
                    "logprobs": [],
                }
            elif isinstance(piece, ToolCallStart):
                yield from self._close("completed")
                yield self._open(
                    {
                        "id": f"fc_{self._suffix}_{len(self.items)}",
                        "type": "function_call",
                        "status": "in_progress",
                        "call_id": self._message.calls[piece.index].id,
                        "name": piece.name,
                        "arguments": "",
                    }
                )
            else:
                self.items[-1]["arguments"] += piece.fragment
                yield {
                    "type": "response.function_call_arguments.delta",
                    **self._place(),
                    "delta": piece.fragment,
                }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._is_open = True
        # a copy: the item goes on growing, and the event is a thing of its moment
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _open_text(self) -> list[Event]:
        item: dict[str, Any] = {
            "id": f"msg_{self._suffix}_{len(self.items)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        added = self._open(item)
        item["content"] = [_part("")]
        part = {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": _part("")}
        return [{**added, "item": {**added["item"], "content": []}}, part]

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "message":
            text = item["content"][0]["text"]
            place = {**self._place(), "content_index": 0}
            events.append({"type": "response.output_text.done", **place, "text": text, "logprobs": []})
            events.append({"type": "response.content_part.done", **place, "part": _part(text)})
        else:
            events.append(
                {
                    "type": "response.function_call_arguments.done",
                    **self._place(),
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
            )
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)})
        return events


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
