"""Plain text for terminals and pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, two spaces between them, no trailing space."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows))
    return "\n".join(line.rstrip() for line in lines)


def print_error(cause: str, fix: str = "", details: Sequence[str] = ()) -> None:
    """One line with the cause and what to do, then further lines, to standard error."""
    for line in details:
        sys.stderr.write(f"  | {line}\n")
    separator = "" if not fix or cause.endswith((".", "!", "?")) else "."
    sys.stderr.write(f"Error: {cause}{separator} {fix}".rstrip() + "\n")
