"""Server-sent events out of bytes, as the HTML standard reads them: any line end, comments, data of several lines."""

from __future__ import annotations

from typing import Final

_LONGEST_EVENT: Final = 8 * 2**20


class EventParser:
    """Feed it pieces of a stream, however they are cut.

    Attributes:
        last_id: of the last whole event that had one.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self._rest = b""
        self._id = ""
        self._data: list[bytes] = []
        self._skips_lf = False
        self._is_first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` has completed. Raises ValueError for one of more than 8 MiB."""
        if self._skips_lf and piece:  # the other half of a CRLF
            self._skips_lf = False
            piece = piece.removeprefix(b"\n")
        raw = self._rest + piece if self._rest else piece
        if b"\r" in raw:
            self._skips_lf = raw.endswith(b"\r")
            raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = raw.split(b"\n")
        if len(self._rest) > _LONGEST_EVENT:
            raise ValueError("a line of more than 8 MiB")
        events: list[bytes] = []
        for line in lines:
            self._take(line, events)
        return events

    def finish(self) -> list[bytes]:
        """What a whole stream ended with where its last blank line is missing; some servers leave it out."""
        events = self.feed(b"\n\n")
        self._rest = b""
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            self.last_id = self._id
            if self._data:
                events.append(b"\n".join(self._data) if len(self._data) > 1 else self._data[0])
                self._data.clear()
        elif line == b"data":
            self._data.append(b"")
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"id:") and b"\0" not in line:
            self._id = line[3:].removeprefix(b" ").decode(errors="replace")
