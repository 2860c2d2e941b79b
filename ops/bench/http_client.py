"""A lean HTTP/1.1 client for load: it shares the cores with what it measures, so it does next to nothing.

One connection, kept alive, one request at a time. A stream is read as bytes and understood after its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from ops.errors import OperationError

#: No request of a bench takes as long.
BOUND_S: Final = 300.0
_PIECE: Final = 65536
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
#: What OpenAI's streams end with.
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Stream:
    """What came of one event stream. Times are of `time.perf_counter`.

    Attributes:
        num_tokens: by the last event's usage, else one an event.
        last: the last event.
        arrivals: when each piece with an event, or several, came.
    """

    started: float
    first_token: float
    ended: float
    num_tokens: int
    last: dict[str, Any]
    arrivals: tuple[float, ...] = ()


class HttpConnection:
    """A connection to `url`; close it, or use it as a context."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        self._streams = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()

    async def get(self, path: str) -> bytes:
        """Body of the answer. Raises OperationError where it is none of success."""
        return (await self._succeed("GET", path, b""))[1]

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON object. Raises OperationError where the answer is none of success."""
        answer: dict[str, Any] = json.loads((await self._succeed("POST", path, json.dumps(body).encode()))[1])
        return answer

    async def try_post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of the answer, whatever it is."""
        async with asyncio.timeout(BOUND_S):
            head, received = await self._call("POST", path, json.dumps(body).encode())
        answer: dict[str, Any] = json.loads(received)
        return _status(head), answer

    async def open_stream(self, path: str) -> None:
        """Get an event stream, and leave it open, unread. Raises OperationError where there is none."""
        async with asyncio.timeout(BOUND_S):
            head, received = await self._exchange("GET", path, b"")
        if _status(head) != 200:
            raise _refused(head, "GET", path, received)

    async def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """Post, and read the events to their end. Raises OperationError where a job did not succeed."""
        payload = json.dumps(body).encode()
        async with asyncio.timeout(BOUND_S):
            started = time.perf_counter()
            head, received = await self._exchange("POST", path, payload)
            reader, _ = self._open()
            if b"transfer-encoding: chunked" not in head:
                raise _refused(head, "POST", path, received)
            piece = bytes(received)
            arrivals: list[float] = []
            while True:
                if b"data: " in piece:
                    arrivals.append(time.perf_counter())
                if received.endswith(_LAST_CHUNK):
                    break
                piece = await reader.read(_PIECE)
                if not piece:
                    raise OperationError(f"POST {path}: the stream was cut", "Look at the service's log")
                received += piece
            ended = time.perf_counter()
        data = [line[6:] for line in dechunked(bytes(received)).splitlines() if line[:6] == b"data: "]
        events = [json.loads(line) for line in data if line != _DONE]
        if not events or events[-1].get("error"):
            raise OperationError(f"POST {path}: the stream ended with {events[-1:]}", "Look at the worker's log")
        usage = events[-1].get("usage")
        num_tokens = int(usage["completion_tokens"]) if usage else len(events)
        return Stream(started, arrivals[0], ended, num_tokens, events[-1], tuple(arrivals))

    def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            raise RuntimeError("the connection is not open")
        return self._streams

    async def _exchange(self, method: str, path: str, payload: bytes) -> tuple[bytes, bytearray]:
        """Send a request; returns the answer's head, and the bytes of its body that came with it."""
        reader, writer = self._open()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        if payload:
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        writer.write(f"{head}\r\n".encode() + payload)
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            piece = await reader.read(_PIECE)
            if not piece:
                raise OperationError(f"{method} {path}: the connection was cut", "Look at the service's log")
            received += piece
        return bytes(received[:end]).lower(), received[end + 4 :]

    async def _succeed(self, method: str, path: str, payload: bytes) -> tuple[bytes, bytes]:
        async with asyncio.timeout(BOUND_S):
            head, received = await self._call(method, path, payload)
        if _status(head) // 100 != 2:
            raise _refused(head, method, path, bytearray(received))
        return head, received

    async def _call(self, method: str, path: str, payload: bytes) -> tuple[bytes, bytes]:
        """The answer's head and its whole body."""
        head, received = await self._exchange(method, path, payload)
        reader, _ = self._open()
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        if len(received) < length:
            received += await reader.readexactly(length - len(received))
        return head, bytes(received)


def dechunked(body: bytes) -> bytes:
    """What a body in chunked transfer coding holds (RFC 9112, section 7.1)."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2


def _status(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def _refused(head: bytes, method: str, path: str, body: bytearray) -> OperationError:
    status = _status(head)
    shown = bytes(body[:300]).decode(errors="replace")
    return OperationError(f"{method} {path}: the service answered {status}: {shown}", "Look at its log")
