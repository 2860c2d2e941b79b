"""A lean client of our own service for load: one connection, kept alive, one request at a time.

It shares the cores with what it measures, so a stream is read as bytes (`ops/bench/http_wire.py`) and understood after
its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from ops.bench.event_parser import EventParser
from ops.bench.http_body import BadAnswerError
from ops.bench.http_wire import Address, CutError, Exchange, WireConnection
from ops.errors import OperationError

#: No request of a bench takes as long.
BOUND_S: Final = 300.0
#: What OpenAI's streams end with.
DONE: Final = b"[DONE]"


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
        self._address = Address.of(url)
        self._connection: WireConnection | None = None

    async def __aenter__(self) -> Self:
        self._connection = await WireConnection.open(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()

    async def get(self, path: str) -> bytes:
        """Body of the answer. Raises OperationError where it is none of success."""
        return await self._succeed("GET", path, b"")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON object. Raises OperationError where the answer is none of success."""
        answer: dict[str, Any] = json.loads(await self._succeed("POST", path, json.dumps(body).encode()))
        return answer

    async def try_post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of the answer, whatever it is."""
        status, received = await self._call("POST", path, json.dumps(body).encode())
        answer: dict[str, Any] = json.loads(received)
        return status, answer

    async def open_stream(self, path: str) -> None:
        """Get an event stream, and leave it open, unread. Raises OperationError where there is none."""
        with _named("GET", path):
            async with asyncio.timeout(BOUND_S):
                exchange = self._begin("GET", path, b"")
                head = await exchange.head()
                if head.status != 200:
                    await exchange.end()
                    raise _refused(head.status, "GET", path, exchange.body)

    async def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """Post, and read the events to their end. Raises OperationError where a job did not succeed."""
        payload = json.dumps(body).encode()
        with _named("POST", path):
            async with asyncio.timeout(BOUND_S):
                exchange = self._begin("POST", path, payload)
                head = await exchange.head()
                await exchange.end()
                ended = time.perf_counter()
        if head.media_type != "text/event-stream":
            raise _refused(head.status, "POST", path, exchange.body)
        arrivals = [at for at, piece in zip(exchange.times, exchange.pieces, strict=True) if b"data: " in piece]
        events = [json.loads(data) for data in EventParser().feed(exchange.body) if data != DONE]
        if not events or events[-1].get("error"):
            raise OperationError(f"POST {path}: the stream ended with {events[-1:]}", "Look at the worker's log")
        usage = events[-1].get("usage")
        num_tokens = int(usage["completion_tokens"]) if usage else len(events)
        return Stream(exchange.started, arrivals[0], ended, num_tokens, events[-1], tuple(arrivals))

    def _begin(self, method: str, path: str, payload: bytes) -> Exchange:
        if self._connection is None:
            raise RuntimeError("the connection is not open")
        return self._connection.begin(method, path, {}, payload)

    async def _succeed(self, method: str, path: str, payload: bytes) -> bytes:
        status, received = await self._call(method, path, payload)
        if status // 100 != 2:
            raise _refused(status, method, path, received)
        return received

    async def _call(self, method: str, path: str, payload: bytes) -> tuple[int, bytes]:
        """Status and whole body of the answer."""
        with _named(method, path):
            async with asyncio.timeout(BOUND_S):
                exchange = self._begin(method, path, payload)
                head = await exchange.head()
                await exchange.end()
        return head.status, exchange.body


@contextmanager
def _named(method: str, path: str) -> Iterator[None]:
    try:
        yield
    except (CutError, BadAnswerError) as error:
        raise OperationError(f"{method} {path}: {error}", "Look at the service's log") from error


def _refused(status: int, method: str, path: str, body: bytes) -> OperationError:
    shown = body[:300].decode(errors="replace")
    return OperationError(f"{method} {path}: the service answered {status}: {shown}", "Look at its log")
