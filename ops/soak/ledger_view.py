"""The ledger at the end of a soak: every record with its log, and what should be gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from ops.soak.observations import ENDED, LedgerJob, Leftovers
from tasks import entries, keys
from tasks.registry import list_workers_async

T = TypeVar("T")
_PAGE: Final = 200
_LOOK_S: Final = 0.5
#: Constant in number: docs/durability names them.
_KEPT: Final = frozenset({keys.MODELS, keys.SCHEMA, keys.UNACKED, keys.UNACKED_INDEX, keys.UNACKED_MUTEX})
_FIELDS: Final = ("id", "input", "seed", "status", "k", "group", "error", "rides", "deaths")


async def read_jobs(client: redis.asyncio.Redis) -> dict[str, LedgerJob]:
    """Every job that the ledger holds, by id."""
    ids = await _ids(client)
    jobs: dict[str, LedgerJob] = {}
    for page in _pages(ids):
        async with client.pipeline(transaction=False) as pipeline:
            for id in page:
                pipeline.hmget(keys.record(id), list(_FIELDS))
                pipeline.get(keys.text(id))
                pipeline.xrange(keys.log(id))
            answers = await pipeline.execute()
        for n, id in enumerate(page):
            values, text, log = answers[3 * n : 3 * n + 3]
            if values[0] is not None:
                jobs[id] = _job(dict(zip(_FIELDS, values, strict=True)), text or "", log)
    return jobs


def _job(record: dict[str, str | None], text: str, log: list[tuple[str, dict[str, str]]]) -> LedgerJob:
    given = json.loads(record["input"] or "{}")
    error: dict[str, Any] = json.loads(record["error"]) if record["error"] else {}
    return LedgerJob(
        id=str(record["id"]),
        prompt=str(given.get("prompt") or ""),
        seed=int(record["seed"] or 0),
        status=str(record["status"]),
        k=int(record["k"] or 0),
        text=text,
        group=record["group"] or "",
        error_code=str(error.get("code") or ""),
        error_message=str(error.get("message") or ""),
        rides=int(record["rides"] or 0),
        deaths=int(record["deaths"] or 0),
        log=tuple((entry_id, entries.decode(fields["d"])) for entry_id, fields in log),
    )


async def wait_until_settled(client: redis.asyncio.Redis, bound_s: float) -> float:
    """Wait until no job is queued or running; returns the seconds, also where the bound was reached."""
    started = time.monotonic()
    while time.monotonic() - started < bound_s:
        try:
            if not await _num_open(client):
                break
        except (RedisError, OSError):
            pass  # it was killed just now, and comes back
        await asyncio.sleep(_LOOK_S)
    return time.monotonic() - started


async def read_leftovers(client: redis.asyncio.Redis, pool: str, bound_s: float) -> Leftovers:
    """What is left over, once nothing is, or after `bound_s`."""
    until = time.monotonic() + bound_s
    while True:
        try:
            left = await _leftovers(client, pool)
            if left == Leftovers() or time.monotonic() >= until:
                return left
        except (RedisError, OSError):
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_LOOK_S)


async def _leftovers(client: redis.asyncio.Redis, pool: str) -> Leftovers:
    workers = await list_workers_async(client)
    names = [str(name) async for name in client.scan_iter("*", count=1000)]
    without_ttl: list[str] = []
    for page in _pages([name for name in names if name not in _KEPT and not _is_of_kombu(name)]):
        async with client.pipeline(transaction=False) as pipeline:
            for name in page:
                pipeline.pttl(name)
            without_ttl.extend(name for name, ttl in zip(page, await pipeline.execute(), strict=True) if ttl == -1)
    queues = (keys.wait(pool), keys.invited(pool), keys.DUE)
    waiting = [f"{name}: {member!s}" for name in queues for member in await client.zrange(name, 0, -1)]
    # what dead workers had taken and not acknowledged is kombu's to give up, after its visibility timeout
    messages = int(await client.llen(keys.queue(pool)))
    return Leftovers(
        slots_taken=sum(worker.slots - worker.free for worker in workers),
        keys_without_ttl=tuple(without_ttl),
        waiting=tuple(waiting),
        messages=messages,
    )


def _is_of_kombu(name: str) -> bool:
    return name.startswith(("_kombu.", "carpool.")) or name == keys.NATIVE_QUEUE


async def _ids(client: redis.asyncio.Redis) -> list[str]:
    prefix = keys.record("")
    return [str(name).removeprefix(prefix) async for name in client.scan_iter(f"{prefix}*", count=1000)]


async def _num_open(client: redis.asyncio.Redis) -> int:
    num_open = 0
    for page in _pages(await _ids(client)):
        async with client.pipeline(transaction=False) as pipeline:
            for id in page:
                pipeline.hget(keys.record(id), "status")
            num_open += sum(status not in ENDED for status in await pipeline.execute())
    return num_open


def _pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _PAGE):
        yield items[start : start + _PAGE]
