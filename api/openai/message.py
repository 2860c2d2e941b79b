"""What the text of one job says as an assistant's message: content, and calls of tools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tasks.tool_calls import Piece, TextPiece, ToolCallParser, ToolCallStart


def call_id(job_id: str, index: int) -> str:
    """Id of a job's call number `index`: the same on every replica and in every replay of its stream."""
    return f"call_{hashlib.blake2b(f'{job_id}:{index}'.encode(), digest_size=12).hexdigest()}"


@dataclass
class Call:
    """A call of a tool, as far as it is there."""

    id: str
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class MessageFold:
    """Puts a message together from the text that each token released; the same text gives the same pieces.

    Args:
        uses_tools: the text may hold calls; else it is content as it stands.
    """

    job_id: str
    uses_tools: bool
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parser = ToolCallParser() if self.uses_tools else None

    def feed(self, text: str) -> list[Piece]:
        """What the next text adds."""
        if self._parser is None:
            pieces: list[Piece] = [TextPiece(text)] if text else []
        else:
            pieces = list(self._parser.feed(text))
        return self._taken(pieces)

    def finish(self) -> list[Piece]:
        """What was still held back, because it might have become a call."""
        return [] if self._parser is None else self._taken(list(self._parser.finish()))

    def _taken(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, TextPiece):
                self.content += piece.text
            elif isinstance(piece, ToolCallStart):
                self.calls.append(Call(call_id(self.job_id, piece.index), piece.name))
            else:
                self.calls[piece.index].arguments += piece.fragment
        return pieces

    def body(self) -> dict[str, Any]:
        """The message of an answer that is whole."""
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message["tool_calls"] = [call.body() for call in self.calls]
        return message

    def delta(self, pieces: list[Piece]) -> dict[str, Any]:
        """These pieces as the delta of one chunk."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, TextPiece):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, ToolCallStart):
                calls[piece.index] = {"index": piece.index, **Call(self.calls[piece.index].id, piece.name).body()}
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.fragment
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's for the job's."""
        return "tool_calls" if self.calls and reason == "stop" else reason
