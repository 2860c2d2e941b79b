"""The calls of the ledger for metrics, with typed arguments and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tasks.calls import Call, Calls
from tasks.metric_histograms import OF_JOBS

#: So many events are summed up in one call: about a millisecond of the server's time.
TALLY_PAGE: Final = 300


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """How a pool is at one moment, and what was counted of it.

    Attributes:
        running: jobs that ride under a lease that holds.
        waiting: jobs that do not ride, those included whose worker was lost.
        invited: of those, the ones that have a message in the broker or on its way.
        oldest_ms: how long the one that has waited longest has done so.
        queued_jobs, queued_tokens: of those that wait, what the caps on the queue count.
        eta_ms: what a job at the end of the queue would wait; None where nobody can tell.
        slots: of workers that are ready.
        used: slots that are taken, by the workers' own word.
        generated: tokens in the logs of all jobs.
        states: how many workers are in each state.
        counted: the counters, by their names in Redis.
    """

    pool: str
    running: int
    waiting: int
    invited: int
    oldest_ms: int
    queued_jobs: int
    queued_tokens: int
    eta_ms: int | None
    slots: int
    used: int
    generated: int
    states: Mapping[str, int]
    counted: Mapping[str, int]


class MetricCalls(Calls):
    """The calls of the ledger, and those for metrics."""

    def tally(self) -> Call[int]:
        """Sum up what happened to jobs. Answers how many events there were; with TALLY_PAGE there may be more."""
        body = {"page": TALLY_PAGE, "bounds": {one.name: list(one.bounds) for one in OF_JOBS}}
        return self._call("tally", [], (json.dumps(body),), int)

    def observe(self, incarnation: str, pool: str, number: int, add: Mapping[str, int]) -> Call[bool]:
        """Add what a worker has measured; reports of a worker are numbered from 1, and one sent again counts once.

        False where the worker has no heartbeat: then nothing was added, and it is to be sent again.
        """
        body = {"incarnation": incarnation, "pool": pool, "number": number, "add": dict(add)}
        return self._call("observe", [], (json.dumps(body),), bool)

    def gauges(self) -> Call[list[PoolNumbers]]:
        """How every pool is, by name, and what was counted of it."""
        return self._call("gauges", [], (), _parse_gauges)


def _parse_gauges(answer: list[Any]) -> list[PoolNumbers]:
    return [
        _parse_pool(str(pool), json.loads(numbers), counted)
        for pool, numbers, counted in zip(answer[::3], answer[1::3], answer[2::3], strict=True)
    ]


def _parse_pool(pool: str, now: dict[str, Any], counted: list[str]) -> PoolNumbers:
    eta = now.get("eta_ms")
    return PoolNumbers(
        pool,
        running=int(now["running"]),
        waiting=int(now["waiting"]),
        invited=int(now["invited"]),
        oldest_ms=int(now["oldest_ms"]),
        queued_jobs=int(now["queued_jobs"]),
        queued_tokens=int(now["queued_tokens"]),
        eta_ms=None if eta is None else int(eta),
        slots=int(now["slots"]),
        used=int(now["used"]),
        generated=int(now["generated"]),
        states={name: int(number) for name, number in now["states"].items()},
        counted={name: int(number) for name, number in zip(counted[::2], counted[1::2], strict=True)},
    )
