"""Calls of tools as text: the form that the grammar enforces, and a parser that reads it piece by piece.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

It is the form of Hermes and Qwen models; white space may stand on either side of the object and between calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')
_REST: Final = re.compile(r"\s*\}\s*" + CLOSE)
#: What decides where a JSON object ends.
_STRUCTURE: Final = re.compile(r'["\\{}]')


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `index`, from 0, begins: the name of its function is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call number `index`; all fragments put together are its JSON object."""

    index: int
    fragment: str


Piece = TextPiece | ToolCallStart | ToolCallArguments


def render_call(name: str, arguments: str) -> str:
    """A call as text; `arguments` is JSON text and is taken over as it is."""
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}{CLOSE}'


def render_result(text: str) -> str:
    """What a tool answered, for a chat template that knows no tools. The form of Hermes and Qwen models."""
    return f"<tool_response>\n{text}\n</tool_response>"


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message tells a model about its tools, where its chat template has no words for them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = render_call("<function-name>", "<arguments-as-JSON-object>")
    return (
        "You may call one or more functions to answer. Their signatures, as JSON, one in each line:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, answer with its name and its arguments, and nothing behind them:\n{example}"
    )


class ToolCallParser:
    """Tells text from calls in the text of one sequence, however it is cut into pieces.

    What begins like a call and is none comes out as text, so nothing is lost. White space between calls, and between
    a text and a call, belongs to neither and is left out.
    """

    def __init__(self) -> None:
        self._held = ""
        self._read = self._read_text
        self._num_calls = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> list[Piece]:
        """Take in a piece of text; returns what is certain by now, in order."""
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What is still held, when no more text will come: a half call without its name is text."""
        held, self._held = self._held, ""
        if self._read == self._read_head:
            held = OPEN + held
        elif self._read == self._read_end:
            held = ""  # a half "}</tool_call>"
        return [TextPiece(held)] if held and not (self._num_calls and held.isspace()) else []

    def _read_text(self, pieces: list[Piece]) -> bool:
        """Text up to the next call. Each of these methods returns whether there is more to read now."""
        before, opened, rest = self._held.partition(OPEN)
        if opened:
            if before.strip():
                pieces.append(TextPiece(before.rstrip()))
            self._held, self._read = rest, self._read_head
            return True
        keep_from = len(self._held)
        for length in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if OPEN.startswith(self._held[-length:]):
                keep_from -= length
                break
        certain = self._held[:keep_from].rstrip()
        if certain:
            pieces.append(TextPiece(certain))
            self._held = self._held[len(certain) :]
        return False

    def _read_head(self, pieces: list[Piece]) -> bool:
        """The name, up to the arguments' brace."""
        if head := _HEAD.match(self._held):
            pieces.append(ToolCallStart(self._num_calls, head[1]))
            self._held, self._read = self._held[head.end() :], self._read_arguments
            self._num_calls += 1
            return True
        if CLOSE in self._held:
            nothing, _, rest = self._held.partition(CLOSE)
            pieces.append(TextPiece(OPEN + nothing + CLOSE))
            self._held, self._read = rest, self._read_text
            return True
        return False

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        """The arguments, up to the brace that closes them."""
        end = self._end_of_object()
        fragment, self._held = self._held[:end], self._held[end:]
        if fragment:
            pieces.append(ToolCallArguments(self._num_calls - 1, fragment))
        if self._depth:
            return False
        self._read = self._read_end
        return True

    def _read_end(self, pieces: list[Piece]) -> bool:
        """What closes the call."""
        end = _REST.match(self._held)
        if end is None:
            return False
        self._held, self._read = self._held[end.end() :], self._read_text
        return True

    def _end_of_object(self) -> int:
        """How much of what is held belongs to the object of the arguments."""
        if self._escaped and self._held:
            self._escaped = False
            start = 1
        else:
            start = 0
        while found := _STRUCTURE.search(self._held, start):
            start = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    if start == len(self._held):
                        self._escaped = True
                    start += 1
                case "{" if not self._in_string:
                    self._depth += 1
                case "}" if not self._in_string:
                    self._depth -= 1
                    if not self._depth:
                        return start
        return len(self._held)
