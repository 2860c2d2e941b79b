"""What is counted of the queue, against the records themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import redis

from tasks import keys


def check_counts(client: redis.Redis, pool: str) -> None:
    """Every count and every order that is kept beside the wait set says what the wait set and the records say."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.zrange(keys.wait(pool), 0, -1, withscores=True)
        pipeline.hgetall(keys.queued(pool))
        pipeline.hgetall(keys.load(pool))
        pipeline.zrange(keys.shares(pool), 0, -1)
        waiting, queued, load, shares = pipeline.execute()
    orders: dict[str, float] = dict(waiting)
    assert set(queued) == set(orders), "what waits is what is counted"
    weights = {id: str(client.hget(keys.record(id), "weight")) for id in orders}
    assert queued == weights
    sums: Counter[str] = Counter()
    own: dict[str, dict[str, float]] = {}
    for id, weight in weights.items():
        tokens, most, kind, counted, owner = weight.split(" ", 4)
        own.setdefault(owner, {})[id] = orders[id]
        sums[f"max:{kind}"] += int(most)
        names = (("jobs", 1), ("tokens", int(tokens)))
        if counted == "1":
            sums.update({name: value for base, value in names for name in (base, f"{base}:{owner}")})
        else:
            sums.update({"fed": 1, "fed_tokens": int(tokens)})
    held = {name: int(value) for name, value in load.items() if name != "checked"}
    assert {name: value for name, value in held.items() if value} == {name: n for name, n in sums.items() if n}
    assert set(shares) == set(own), "those have a share of whom something waits"
    for owner, ids in own.items():
        found: Any = client.zrange(keys.own(pool, owner), 0, -1, withscores=True)
        assert dict(found) == ids
