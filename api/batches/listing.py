"""Records that an index lists by time, page by page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import redis.asyncio

from tasks import keys

Record = dict[str, str]
_PAGE: Final = 1000


async def read_record(client: redis.asyncio.Redis, key: str, owner: str) -> Record:
    """A hash; empty where there is none, or another's. "" sees all."""
    record = cast(Record, await client.hgetall(key))
    return record if not owner or (record.get("key") or keys.NO_KEY) == owner else {}


async def list_records(
    client: redis.asyncio.Redis,
    index: str,
    key: Callable[[str], str],
    *,
    after: str,
    limit: int,
    newest_first: bool = True,
    wanted: Callable[[Record], bool] = bool,
) -> tuple[list[Record], bool]:
    """Up to `limit` records behind the one with id `after` ("": from the beginning), and whether there are more.

    Args:
        index: a sorted set of ids, by time.
        key: the key of an id's record; one that has expired is passed over.

    Raises:
        LookupError: the index does not know `after`.
    """
    start, end = ("+inf", "-inf") if newest_first else ("-inf", "+inf")
    if after:
        score = await client.zscore(index, after)
        if score is None:
            raise LookupError(after)
        start = f"({float(str(score)):.0f}"
    found: list[Record] = []
    while len(found) <= limit:
        size = min(limit + 1 - len(found), _PAGE)
        answer = await client.zrange(
            index, start, end, desc=newest_first, byscore=True, offset=0, num=size, withscores=True
        )
        page = cast(list[tuple[str, float]], answer)
        if not page:
            break
        start = f"({page[-1][1]:.0f}"
        async with client.pipeline(transaction=False) as pipeline:
            for id, _ in page:
                pipeline.hgetall(key(id))
            records = cast(list[Record], await pipeline.execute())
        found.extend(record for record in records if record and wanted(record))
    return found[:limit], len(found) > limit
