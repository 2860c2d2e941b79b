"""Heads and bodies of HTTP/1.1 answers, understood as their bytes come (RFC 9112)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

_LONGEST_LINE: Final = 4096
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;|$)")


class BadAnswerError(Exception):
    """What came is no HTTP, or more than anybody can mean."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; the names in lower case."""

    status: int
    headers: Mapping[str, str]
    is_http_1_1: bool = True

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises BadAnswerError."""
        first, *lines = raw.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not _is_number(rest[:3]):
            raise BadAnswerError(f"an answer that is no HTTP/1: {first[:80]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadAnswerError(f"a header without a colon: {line[:80]!r}")
            headers[name.strip().lower()] = value.strip()
        return cls(int(rest[:3]), headers, version != "HTTP/1.0")

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def keeps_alive(self) -> bool:
        word = self.headers.get("connection", "").lower()
        return "close" not in word if self.is_http_1_1 else "keep-alive" in word


class Chunked:
    """Takes the chunked transfer coding off as bytes come (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self.has_ended = False
        self.rest = b""
        self._left = 0
        self._ends_chunk = False
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body. Behind the end, `rest` is what came after it. Raises BadAnswerError."""
        raw = self.rest + data if self.rest else data
        at, size, parts = 0, len(raw), []
        while True:
            if self._left:
                piece = raw[at : at + self._left]
                parts.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._ends_chunk = True
            if self._ends_chunk:
                if size - at < 2:
                    break
                if raw[at : at + 2] != b"\r\n":
                    raise BadAnswerError("a chunk that is longer than it says")
                at += 2
                self._ends_chunk = False
            line_end = raw.find(b"\r\n", at)
            if line_end < 0:
                if size - at > _LONGEST_LINE:
                    raise BadAnswerError("a chunk's head without an end")
                break
            line, at = raw[at:line_end], line_end + 2
            if self._in_trailers:
                if not line:
                    self.has_ended = True
                    break
                continue
            found = _CHUNK_SIZE.match(line)
            if found is None:
                raise BadAnswerError(f"a chunk of the size {line[:40]!r}")
            self._left = int(found[1], 16)
            self._in_trailers = not self._left
        self.rest = raw[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Sized:
    """A body of `Content-Length` bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.rest = b""

    @property
    def has_ended(self) -> bool:
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        body, self.rest = data[: self._left], data[self._left :]
        self._left -= len(body)
        return body


class UntilClose:
    """A body that ends with the connection."""

    has_ended = False
    rest = b""

    def feed(self, data: bytes) -> bytes:
        return data


Body = Chunked | Sized | UntilClose


def body_of(head: Head) -> Body:
    """What takes the body of an answer to a GET or POST. Raises BadAnswerError."""
    coding = head.headers.get("transfer-encoding", "").lower()
    if coding:
        if coding != "chunked":
            raise BadAnswerError(f"transfer-encoding {coding[:40]!r}, which was not asked for")
        return Chunked()
    if head.status in (204, 304):
        return Sized(0)
    length = head.headers.get("content-length")
    if length is None:
        return UntilClose()
    if not _is_number(length):
        raise BadAnswerError(f"content-length {length[:40]!r}")
    return Sized(int(length))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
