"""What metrics count, against the records themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import redis

from tasks import keys
from tasks.metric_calls import PoolNumbers
from tasks.metric_histograms import CLASSES, FIRST_TOKEN, QUEUE, WHOLE, observed

ENDED = ("succeeded", "failed", "cancelled", "expired")


def happened(client: redis.Redis, pool: str) -> Counter[str]:
    """How often each thing has happened to jobs of a pool, summed up or not yet: by kind of line, and by status."""
    counted = {str(name): int(value) for name, value in client.hgetall(keys.counted(pool)).items()}
    seen: Counter[str] = Counter()
    for kind, histogram in (("q", QUEUE), ("f", FIRST_TOKEN), ("whole", WHOLE)):
        for of_class in CLASSES:
            found = observed(counted, histogram, of_class)
            seen[kind] += sum(found.counts) if found else 0
    for name, number in counted.items():
        what, _, rest = name.partition(":")
        if what == "ended":
            seen[rest.partition(":")[0]] += number
        elif what == "recovered":
            seen[rest] += number
    seen["generated"] += int(str(client.hget(keys.GENERATED, pool) or 0))
    for line in client.lrange(keys.SEEN, 0, -1):
        kind, first, *_ = str(line).split(" ")
        seen[first if kind in ("e", "r") else kind] += 1
        seen["whole"] += kind == "e" and first == "succeeded"
    return seen


def check_counted_once(client: redis.Redis, pool: str, records: Iterable[Mapping[str, str]]) -> None:
    """Whatever was lost, sent again or killed: each job counts once as begun, as having a token and as ended."""
    seen = happened(client, pool)
    there = [record for record in records if record]
    assert seen["q"] == sum(bool(record.get("started_at")) for record in there), "each first ride counts once"
    assert seen["f"] == sum(record["k"] != "0" for record in there), "each first token counts once"
    assert seen["generated"] == sum(int(record["k"]) for record in there), "each token counts once"
    for status in ENDED:
        assert seen[status] == sum(record["status"] == status for record in there), f"each job that has {status} once"
    assert seen["whole"] == seen["succeeded"]


def check_gauges(found: Sequence[PoolNumbers], records: Iterable[Mapping[str, str]], now_ms: int) -> None:
    """What waits and what rides is what lives, and who rides has a lease."""
    there = [record for record in records if record and record["status"] not in ENDED]
    riding = sum(record["status"] == "running" and int(record["lease"]) >= now_ms for record in there)
    assert sum(pool.running for pool in found) == riding
    assert sum(pool.waiting for pool in found) == len(there) - riding
