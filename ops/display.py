"""What `carpool up` shows: phases with progress, and one box at the end. Plain lines where nobody looks on."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

_ERASE_LINE = "\r\x1b[2K"
_GREEN, _RED, _DIM, _RESET = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
#: In a log, a phase says at most so often how far it is.
_PLAIN_STEP = 0.25


def is_fancy(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether colours and lines that are written over are wanted: a terminal, without NO_COLOR (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Display:
    """Writes phases as they come and go.

    A terminal shows the running phases in one line that is written over, a pipe gets a line for each new phase and
    for each quarter of it. A stream that cannot be written to any more (closed terminal, closed pipe) is let go.
    """

    def __init__(self, stream: TextIO | None = None, *, fancy: bool | None = None) -> None:
        self._stream: TextIO | None = stream if stream is not None else sys.stdout
        self._fancy = is_fancy(self._stream) if fancy is None else fancy
        self._running: dict[str, tuple[str, float | None]] = {}
        self._began: dict[str, float] = {}
        self._shown: dict[str, tuple[str, int]] = {}

    def phase(self, name: str, what: str, fraction: float | None = None) -> None:
        """`name` (redis, api, worker-1) is now doing `what`, and so far with it (0 to 1) where that is known."""
        self._began.setdefault(name, time.monotonic())
        self._running[name] = (what, fraction)
        if self._fancy:
            self._repaint()
            return
        mark = (what, -1 if fraction is None else int(fraction / _PLAIN_STEP))
        if self._shown.get(name) != mark:
            self._shown[name] = mark
            self._write(f"{name}: {_described(what, fraction)}\n")

    def done(self, name: str, result: str) -> None:
        """`name` has finished its phases."""
        self._end(name)
        began = self._began.pop(name, None)
        took = f" ({time.monotonic() - began:.1f} s)" if began is not None else ""
        tick = f"{_GREEN}✓{_RESET} " if self._fancy else ""
        self._line(f"{tick}{name}: {result}{_DIM if self._fancy else ''}{took}{_RESET if self._fancy else ''}")

    def forget(self, name: str) -> None:
        """`name` has no phase any more."""
        self._end(name)
        self._began.pop(name, None)
        if self._fancy:
            self._repaint()

    def note(self, text: str) -> None:
        """One line about what just happened."""
        self._line(text)

    def warn(self, text: str) -> None:
        """One line about something that went wrong."""
        self._line(f"{_RED}{text}{_RESET}" if self._fancy else text)

    def box(self, title: str, rows: Sequence[tuple[str, str]], paste: Sequence[tuple[str, str]] = ()) -> None:
        """The closing box: labelled rows, then labelled commands, each alone on its line.

        It has no side borders: they would end up in the pasted text.
        """
        wide = max((len(label) for label, _ in rows), default=0)
        lines = [title, ""]
        lines += [f"  {label:<{wide}}  {value}" for label, value in rows]
        for label, command in paste:
            lines += ["", f"  {label}:", command]
        columns = min(shutil.get_terminal_size((100, 24)).columns, max(len(line) for line in lines) + 2)
        rule = ("─" if self._can_encode("─") else "-") * columns
        self._line("\n".join(("", rule, *lines, rule, "")))

    def _end(self, name: str) -> None:
        self._running.pop(name, None)
        self._shown.pop(name, None)

    def _line(self, text: str) -> None:
        self._write(f"{_ERASE_LINE}{text}\n" if self._fancy else f"{text}\n")
        if self._fancy:
            self._repaint()

    def _repaint(self) -> None:
        line = "  ".join(f"{name}: {_described(*state)}" for name, state in self._running.items())
        columns = shutil.get_terminal_size((100, 24)).columns
        self._write(_ERASE_LINE + line[: columns - 1])

    def _can_encode(self, text: str) -> bool:
        try:
            text.encode(getattr(self._stream, "encoding", None) or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        if not self._can_encode(text):
            text = text.encode("ascii", "replace").decode()
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal or the pipe is closed: the instance goes on without it
            # What the stream still holds must not fail once more when the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream = None


def _described(what: str, fraction: float | None) -> str:
    return what if fraction is None else f"{what} {fraction * 100:.0f} %"
