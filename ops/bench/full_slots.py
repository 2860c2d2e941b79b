"""Loads that last for as long as a window: streams and jobs that keep every slot full, and streams of given jobs.

Jobs that nobody follows show what workers and Redis take; streams show what the API's relaying takes on top.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from ops.bench.http_client import BOUND_S, HttpConnection
from ops.errors import OperationError

_PROBE_S: Final = 0.05
_EVENT: Final = b"data: "


class _StreamClient(asyncio.Protocol):
    """Counts the events of one stream as they come, and when; it does next to nothing else, for it shares the cores."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self.gaps: list[float] | None = None
        self.is_answered = False
        self.is_cut = False
        self._seen_at = 0.0

    def data_received(self, data: bytes) -> None:
        self.is_answered = True
        self.num_bytes += len(data)
        events = data.count(_EVENT)
        if not events:
            return
        now = time.perf_counter()
        if self.gaps is not None:
            # events that come together have no time between them
            self.gaps.extend((now - self._seen_at, *(0.0 for _ in range(events - 1))))
        self._seen_at = now
        self.num_events += events

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_cut = True


class FullSlots:
    """The load while it rides.

    Attributes:
        ids: of the jobs; empty for streams, whose jobs end with their connections.
    """

    def __init__(self, ids: Sequence[str], clients: Sequence[_StreamClient]) -> None:
        self.ids = ids
        self._clients = clients

    @property
    def num_events(self) -> int:
        """Events of all streams so far. Raises OperationError where one was cut."""
        if cut := sum(client.is_cut for client in self._clients):
            raise OperationError(f"{cut} of {len(self._clients)} streams were cut", "Look at the API's log")
        return sum(client.num_events for client in self._clients)

    @property
    def num_bytes(self) -> int:
        """Bytes of all streams so far, as they came from the sockets."""
        return sum(client.num_bytes for client in self._clients)

    def start(self) -> None:
        """From here on the time between tokens is noted."""
        for client in self._clients:
            client.gaps = []

    def gaps_ms(self) -> list[float]:
        """Time between one token and the next, of all streams together; empty for jobs."""
        return [1000 * gap for client in self._clients for gap in client.gaps or ()]


@asynccontextmanager
async def streaming(url: str, count: int, max_tokens: int) -> AsyncIterator[FullSlots]:
    """So many streams, each of which has its first token; their clients leave with the block."""
    bodies = [{"prompt": f"Hello, I am {number}", "max_tokens": max_tokens} for number in range(count)]
    async with _streams(url, [_post("/generate_stream", body) for body in bodies]) as clients:
        async with asyncio.timeout(BOUND_S):
            while not all(client.num_events for client in clients):  # noqa: ASYNC110 - protocols have no event for all
                await asyncio.sleep(_PROBE_S)
        yield FullSlots((), clients)


@asynccontextmanager
async def following(url: str, ids: Sequence[str]) -> AsyncIterator[FullSlots]:
    """The streams of these jobs, each of which is answered; their clients leave with the block."""
    async with _streams(url, [f"GET /jobs/{id}/stream HTTP/1.1\r\n{{host}}\r\n" for id in ids]) as clients:
        async with asyncio.timeout(BOUND_S):
            while not all(client.is_answered for client in clients):  # noqa: ASYNC110 - the same
                await asyncio.sleep(_PROBE_S)
        yield FullSlots(ids, clients)


@asynccontextmanager
async def riding(url: str, count: int, max_tokens: int) -> AsyncIterator[FullSlots]:
    """So many jobs that all ride and that nobody follows; they are cancelled, and have ended, with the block."""
    async with HttpConnection(url) as connection:
        bodies: list[dict[str, Any]] = [
            {"prompt": f"Hello, I am {number}", "max_tokens": max_tokens} for number in range(count)
        ]
        ids = [str((await connection.post("/jobs", body))["id"]) for body in bodies]
        async with asyncio.timeout(BOUND_S):
            for id in ids:
                while b'"status":"running"' not in await connection.get(f"/jobs/{id}"):  # noqa: ASYNC110 - as a client
                    await asyncio.sleep(_PROBE_S)
    yield FullSlots(ids, ())
    # another connection: the service has closed one that was silent for so long
    async with HttpConnection(url) as connection:
        for id in ids:
            await connection.post(f"/jobs/{id}/cancel", {})
        for id in ids:
            await connection.get(f"/jobs/{id}?wait=60")


@asynccontextmanager
async def _streams(url: str, requests: Sequence[str]) -> AsyncIterator[list[_StreamClient]]:
    """A connection for each request, `{host}` in which stands for the line that names it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        clients = []
        for request in requests:
            transport, client = await loop.create_connection(_StreamClient, host, port)
            stack.callback(transport.close)
            transport.write(request.replace("{host}", f"Host: {parts.netloc}\r\n", 1).encode())
            clients.append(client)
        yield clients


def _post(path: str, body: Mapping[str, Any]) -> str:
    payload = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\n{{host}}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    return f"{head}\r\n{payload}"
