"""Log files of the supervised processes: each writes into its own, the supervisor rotates them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 16 * 2**20
KEEP = 5
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class ChildLog:
    """`<logs>/<name>.log`, and the older `<name>.log.1` to `<name>.log.5`.

    A child appends to the file itself, so that it goes on writing when its supervisor was killed.
    """

    path: Path

    def start(self) -> None:
        """Begin a new file at the start of an instance; what stands in the last one is kept."""
        if self.path.exists() and self.path.stat().st_size:
            self._shift()
            self.path.rename(self._older(1))

    def open(self) -> int:
        """A descriptor for a child's output, which appends."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def append(self, line: str) -> None:
        """Write one line of the supervisor's own."""
        descriptor = self.open()
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def rotate_if_large(self, max_bytes: int = MAX_BYTES) -> bool:
        """Copy a large file away and empty it.

        Renaming would not do: the child holds it open; as it appends, it goes on at the new end. What is written
        between the copy and the cut is lost, a moment once in `max_bytes`.
        """
        with suppress(FileNotFoundError):
            if self.path.stat().st_size > max_bytes:
                self._shift()
                shutil.copyfile(self.path, self._older(1))
                self._older(1).chmod(0o600)
                os.truncate(self.path, 0)
                return True
        return False

    def tail(self, lines: int = 10) -> tuple[str, ...]:
        """The last lines, without empty ones; fewer where the file has fewer."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ()
        return tuple(line for line in text.splitlines() if line.strip())[-lines:]

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _shift(self) -> None:
        for number in range(KEEP - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._older(number).replace(self._older(number + 1))
