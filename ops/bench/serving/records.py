"""What Carpool tells of a job behind its stream: how long it waited for a slot, and how many workers took it up.

It is asked for after the measurement, so that it costs that nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Final

from ops.bench.serving.call import Outcome
from ops.bench.serving.target import NETWORK_ERRORS, Target

_MOST: Final = 2000
_AT_ONCE: Final = 4


async def read_records(target: Target, outcomes: Sequence[Outcome], bound_s: float) -> None:
    """Fill in `queue_s` and `attempts` of what succeeded, of 2,000 requests at most and for `bound_s` at most."""
    known = [outcome for outcome in outcomes if outcome.succeeded and outcome.job_id]
    asked = iter(known[:: max(1, -(-len(known) // _MOST))])
    try:
        async with asyncio.timeout(bound_s):
            await asyncio.gather(*(_read(target, asked) for _ in range(_AT_ONCE)))
    except TimeoutError:
        return  # the rest is not known, and the table says of how many it is


async def _read(target: Target, outcomes: Iterator[Outcome]) -> None:
    for outcome in outcomes:
        try:
            head, body = await target.get(f"/jobs/{outcome.job_id}")
            if head.status != 200:
                continue  # forgotten meanwhile
            job = json.loads(body)
            outcome.queue_s = max(0.0, float(job["started_at"]) - float(job["created_at"]))
            outcome.attempts = int(job["attempts"])
        except (*NETWORK_ERRORS, ValueError, KeyError, TypeError, RecursionError):
            return  # no service of ours any more
