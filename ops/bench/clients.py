"""Clients that call a service side by side, each on a connection of its own, until a list of requests is used up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from ops.bench.http_client import HttpConnection, Stream

T = TypeVar("T")
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What streaming clients saw, from the first request to the last end."""

    seconds: float
    streams: Sequence[Stream]

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def stream_side_by_side(
    url: str, num_clients: int, bodies: Sequence[Body], path: str = "/generate_stream"
) -> StreamLoad:
    """Post every body, for a stream of events."""

    async def call(connection: HttpConnection, body: Body) -> Stream:
        return await connection.stream(path, body)

    seconds, streams = asyncio.run(_side_by_side(url, num_clients, bodies, call))
    return StreamLoad(seconds, streams)


def generate_side_by_side(url: str, num_clients: int, bodies: Sequence[Body]) -> float:
    """`POST /basic_generate` of every body; returns requests per second."""

    async def call(connection: HttpConnection, body: Body) -> dict[str, Any]:
        return await connection.post("/basic_generate", body)

    seconds, answers = asyncio.run(_side_by_side(url, num_clients, bodies, call))
    return len(answers) / seconds


async def _side_by_side(
    url: str, num_clients: int, bodies: Sequence[Body], call: Callable[[HttpConnection, Body], Awaitable[T]]
) -> tuple[float, list[T]]:
    """Seconds from the first request to the last answer, and the answers."""
    left = iter(bodies)
    answers: list[T] = []

    async def client(connection: HttpConnection) -> None:
        for body in left:
            answer = await call(connection, body)
            answers.append(answer)

    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(HttpConnection(url)) for _ in range(num_clients)]
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(client(connection))
        return time.perf_counter() - started, answers
