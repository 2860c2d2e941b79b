"""The lines of a file, one after the other, of which one and one chunk are in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from api.batches.file_store import FileStore, StoredFile
from tasks.batch_types import Position


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file.

    Attributes:
        number: from 1; lines that are empty count too.
        data: without its end; None where it is longer than a line may be.
        next: where the line behind it begins.
    """

    number: int
    data: bytes | None
    next: Position

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


async def read_lines(store: FileStore, file: StoredFile, at: Position, max_bytes: int) -> AsyncIterator[Line]:
    """The lines from a position on.

    Raises:
        CarpoolError: "file_not_found".
    """
    number, offset = at.line, at.offset
    pending, too_long = bytearray(), False

    def line(next_line: Position) -> Line:
        return Line(next_line.line, None if too_long else bytes(pending), next_line)

    for index in range(at.chunk, file.num_chunks):
        data = await store.chunk(file.id, index)
        while (end := data.find(b"\n", offset)) >= 0:
            pending += data[offset:end]
            offset = end + 1
            number += 1
            too_long = too_long or len(pending) > max_bytes
            yield line(Position(number, index, offset))
            pending.clear()
            too_long = False
        pending += data[offset:]
        offset = 0
        if len(pending) > max_bytes:
            pending.clear()
            too_long = True
    if pending or too_long:
        yield line(Position(number + 1, file.num_chunks, 0))
