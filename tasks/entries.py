"""The entries of a job's log: what stands in the Redis Stream and what its channel carries, byte for byte the same.

An entry is compact UTF-8 JSON `{v, t, n, ids, text, …}`. `n` is the number of tokens that the log holds after it.
Where logprobs were asked for, a token entry has `lp` too, one item per id.
Markers and ends are written by the scripts (`tasks/lua/`), token entries by the worker through `encode_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NotRequired, TypedDict

#: Version of records and entries that this release writes at best; it reads and writes the one before as well. What it
#: writes is decided by all that live (tasks/lua/agree.lua), and a job's log has the version of its record.
VERSION = 1
#: Stands for a logprob of -inf, which JSON cannot say. The same number as OpenAI's.
NO_LOGPROB: Final = -9999.0


class TokenLogprob(TypedDict):
    """A token and its logprob, from the distribution of the model before anything was done to it.

    Attributes:
        id: of the token.
        lp: its natural logarithm of probability; `NO_LOGPROB` for a probability of 0.
        b: its bytes, in UTF-8; a character may be cut in two. Of a special token its name's.
        top: of a generated token, the likeliest ones in falling order, as many as were asked for.
    """

    id: int
    lp: float
    b: list[int]
    top: NotRequired[list[TokenLogprob]]


def token_string(logprob: TokenLogprob) -> str:
    """The token's bytes as text, U+FFFD for what is no character."""
    return bytes(logprob["b"]).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a log.

    Attributes:
        kind: "marker" (an owner boarded), "tokens", or "end" (exactly one, the last).
        n: tokens in the log after this entry.
        ids: token ids, one per token.
        text: text of each token; "" where it is still held back. An end has its tail here, as one item.
        lp: logprobs of each token, also while its text is held back; empty where they were not asked for.
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
    lp: tuple[TokenLogprob, ...] = ()

    @property
    def first(self) -> int:
        """Index of the entry's first token, counted from 1."""
        return self.n - len(self.ids) + 1

    def after(self, have: int) -> Entry:
        """The part of a token entry that follows token `have`."""
        skip = max(0, have - self.first + 1)
        return replace(self, ids=self.ids[skip:], text=self.text[skip:], lp=self.lp[skip:]) if skip else self


def encode_tokens(
    n: int, ids: Sequence[int], text: Sequence[str], lp: Sequence[TokenLogprob] = (), *, version: int = VERSION
) -> str:
    """The token entry whose last token is number `n`; `text` holds one item per id, and so does `lp`, or none.

    `version` is the record's.
    """
    entry: dict[str, Any] = {"v": version, "t": "tokens", "n": n, "ids": list(ids), "text": list(text)}
    if lp:
        entry["lp"] = list(lp)
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
        lp=tuple(raw.get("lp") or ()),
    )
