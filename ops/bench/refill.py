"""How soon a freed slot carries the next job: seen from the log entries as they are published."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import redis.asyncio

from ops.bench.http_client import HttpConnection
from ops.errors import OperationError
from tasks import keys
from tasks.entries import decode
from tasks.redis_clients import database

_JOB_TOKENS: Final = 3
#: Tokens of the job that keeps the slot taken until all others wait.
_BLOCKER_TOKENS: Final = 2000
_BOUND_S: Final = 60.0


@dataclass(slots=True)
class _Observed:
    """When what was seen of the jobs, in seconds of `time.perf_counter`."""

    accepted: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    end: dict[str, float] = field(default_factory=dict)


def refill_times(url: str, redis_url: str, count: int) -> list[float]:
    """Seconds from each end of a job to the first token of the next, on an instance of one slot, `count` jobs waiting.

    Raises:
        OperationError: no job waited when the one before it ended.
    """
    observed = asyncio.run(_observe(url, redis_url, count))
    order = sorted(observed.first_token, key=lambda id: observed.first_token[id])
    found = [
        observed.first_token[id] - observed.end[before]
        for before, id in pairwise(order)
        if observed.accepted[id] < observed.end[before]
    ]
    if not found:
        raise OperationError("No job waited for the slot: they ended faster than they were accepted", "Run it again")
    return found


async def _observe(url: str, redis_url: str, count: int) -> _Observed:
    observed = _Observed()
    async with (
        asyncio.timeout(_BOUND_S),
        redis.asyncio.Redis.from_url(redis_url, socket_timeout=_BOUND_S) as client,
        client.pubsub() as pubsub,
        HttpConnection(url) as connection,
    ):
        await pubsub.psubscribe(keys.channel(database(redis_url), "*"))
        await pubsub.get_message(timeout=_BOUND_S)  # the confirmation
        watching = asyncio.create_task(_watch(pubsub, observed, count + 1))
        for number in range(count + 1):
            max_tokens = _JOB_TOKENS if number else _BLOCKER_TOKENS
            job = await connection.post("/jobs", {"prompt": "Hello, I am", "max_tokens": max_tokens})
            observed.accepted[str(job["id"])] = time.perf_counter()
        await watching
    return observed


async def _watch(pubsub: Any, observed: _Observed, count: int) -> None:
    """Until so many jobs have ended. `pubsub` has no useful types in redis-py."""
    async for message in pubsub.listen():
        now = time.perf_counter()
        id = message["channel"].decode().rpartition(":")[2]
        entry = decode(message["data"])
        if entry.kind == "tokens":
            observed.first_token.setdefault(id, now)
        elif entry.kind == "end":
            observed.end[id] = now
            if len(observed.end) == count:
                return
