"""How long it took from a fault until the jobs that it met had their next token."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import redis.asyncio
from redis.exceptions import RedisError

from ops.soak.observations import ENDED
from tasks import keys

_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Recovery:
    """One job, or one stream, that went on.

    Attributes:
        kind: of the fault that met it.
        at: when that was, of `time.monotonic`.
        seconds: until its next token.
        job: its id, "" of a stream.
    """

    kind: str
    at: float
    seconds: float
    job: str = ""


@dataclass(frozen=True, slots=True)
class _Watch:
    kind: str
    since: float
    k: int


@dataclass(frozen=True, slots=True)
class Riding:
    """A job in a slot: who rides it, and how many tokens its log holds."""

    id: str
    incarnation: str
    k: int


async def riding_jobs(client: redis.asyncio.Redis) -> list[Riding]:
    """All jobs that ride now. Raises RedisError where the server does not answer."""
    ids = [str(id) for id in await client.zrange(keys.DUE, 0, -1)]
    async with client.pipeline(transaction=False) as pipeline:
        for id in ids:
            pipeline.hmget(keys.record(id), ["status", "incarnation", "k"])
        records = await pipeline.execute()
    return [
        Riding(id, str(incarnation), int(k))
        for id, (status, incarnation, k) in zip(ids, records, strict=True)
        if status == "running"
    ]


class Recoveries:
    """Watches jobs that a fault has met, until they go on."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.found: list[Recovery] = []
        self._client = client
        self._watched: dict[str, list[_Watch]] = defaultdict(list)

    def note_stream(self, seconds: float) -> None:
        """A stream that was cut by a fault went on after so many seconds."""
        self.found.append(Recovery("stream", time.monotonic() - seconds, seconds))

    def watch(self, kind: str, since: float, jobs: Sequence[Riding]) -> None:
        """A fault of this kind met these jobs at `since` (of `time.monotonic`), where they had so many tokens."""
        for job in jobs:
            self._watched[job.id].append(_Watch(kind, since, job.k))

    async def run(self) -> None:
        """Look again and again, for ever: another process's write is no event here."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._watched:
                try:
                    await self._look()
                except (RedisError, OSError):
                    continue  # the server is away, as the soak wants

    async def _look(self) -> None:
        ids = list(self._watched)
        async with self._client.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hmget(keys.record(id), ["status", "k"])
            records = await pipeline.execute()
        now = time.monotonic()
        for id, (status, k) in zip(ids, records, strict=True):
            ended = status is None or status in ENDED
            done = [watch for watch in self._watched[id] if ended or int(k) > watch.k]
            for watch in done:
                self.found.append(Recovery(watch.kind, watch.since, now - watch.since, id))
            left = [watch for watch in self._watched[id] if watch not in done]
            if left:
                self._watched[id] = left
            else:
                del self._watched[id]
