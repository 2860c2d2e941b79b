"""The entries of a job's log: what stands in the Redis Stream and what its channel carries, byte for byte the same.

An entry is compact UTF-8 JSON `{v, t, n, ids, text, …}`. `n` is the number of tokens that the log holds after it.
Markers and ends are written by the scripts (`tasks/lua/`), token entries by the worker through `encode_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

#: Version of records and entries that this release writes at best; it reads and writes the one before as well. What it
#: writes is decided by all that live (tasks/lua/agree.lua), and a job's log has the version of its record.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a log.

    Attributes:
        kind: "marker" (an owner boarded), "tokens", or "end" (exactly one, the last).
        n: tokens in the log after this entry.
        ids: token ids, one per token.
        text: text of each token; "" where it is still held back. An end has its tail here, as one item.
        status, finish_reason, usage, error: only of an end.
    """

    kind: Literal["marker", "tokens", "end"]
    n: int
    ids: tuple[int, ...] = ()
    text: tuple[str, ...] = ()
    status: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def first(self) -> int:
        """Index of the entry's first token, counted from 1."""
        return self.n - len(self.ids) + 1

    def after(self, have: int) -> Entry:
        """The part of a token entry that follows token `have`."""
        skip = max(0, have - self.first + 1)
        return replace(self, ids=self.ids[skip:], text=self.text[skip:]) if skip else self


def encode_tokens(n: int, ids: Sequence[int], text: Sequence[str], *, version: int = VERSION) -> str:
    """The token entry whose last token is number `n`; `text` holds one item per id, `version` is the record's."""
    return json.dumps(
        {"v": version, "t": "tokens", "n": n, "ids": list(ids), "text": list(text)},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def decode(data: str | bytes) -> Entry:
    """Read an entry. Raises ValueError for a version or kind that this release does not know."""
    raw = json.loads(data)
    if raw["v"] > VERSION:
        raise ValueError(f"log entry of version {raw['v']}, this release reads up to {VERSION}: upgrade this process")
    if raw["t"] not in ("marker", "tokens", "end"):
        raise ValueError(f"log entry of unknown kind {raw['t']!r}")
    return Entry(
        kind=raw["t"],
        n=int(raw["n"]),
        ids=tuple(raw.get("ids") or ()),
        text=tuple(raw.get("text") or ()),
        status=raw.get("status"),
        finish_reason=raw.get("finish_reason"),
        usage=raw.get("usage"),
        error=raw.get("error"),
    )
