"""How right the ETA is: jobs of mixed lengths in a queue, each one's `eta_s` as it was told against when it was done.

Two workers of the simulated engine. Lengths are drawn from an exponential distribution, so that most jobs are short and
a few are long; jobs come faster than they are done for a while, and then wait in a queue that empties. An error is the
distance between the ETA and the time that the job took from there, as a part of that time.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.report import Figure, at_most, percentile

_WORKERS: Final = 2
_SLOTS: Final = 4
_STEP_MS: Final = 10
_MEAN_TOKENS: Final = 40
_MOST_TOKENS: Final = 400
#: Jobs come so many times as fast as they can be done.
_LOAD: Final = 1.5
_WARM_JOBS: Final = 40
_SEED: Final = 11
_TARGET: Final = at_most(0.3)


@dataclass(frozen=True, slots=True)
class _Told:
    """An ETA in seconds, and when it was told, in seconds since 1970."""

    id: str
    eta_s: float
    at: float


def measure(options: Options) -> Findings:
    num_jobs = 60 if options.quick else 600
    settings = {
        **options.engine_settings,
        "workers": _WORKERS,
        "max_batch_size": _SLOTS,
        "simulated_step_ms": 2 if options.quick else _STEP_MS,
    }
    say("starting an instance")
    with BenchInstance(settings) as instance:
        submitted, polled, unknown, finished = asyncio.run(_run(instance.url, num_jobs, settings))
    at_submission, later = _errors(submitted, finished), _errors(polled, finished)
    figures = [
        Figure("median error of the ETA at submission", percentile(at_submission, 50), "x", _TARGET),
        Figure("the same, 90 % of the jobs", percentile(at_submission, 90), "x"),
        Figure("median error of the ETA of polls", percentile(later, 50), "x", _TARGET),
        Figure("jobs that were told no ETA", float(unknown), "jobs"),
        Figure("median ETA", percentile([one.eta_s for one in submitted], 50), "s"),
    ]
    return Findings(figures, {**settings, "jobs": num_jobs, "mean_tokens": _MEAN_TOKENS, "load": _LOAD})


def _errors(told: Sequence[_Told], finished: dict[str, float]) -> list[float]:
    return [abs(one.eta_s - (finished[one.id] - one.at)) / max(0.001, finished[one.id] - one.at) for one in told]


async def _run(
    url: str, num_jobs: int, settings: dict[str, Any]
) -> tuple[list[_Told], list[_Told], int, dict[str, float]]:
    chance = random.Random(_SEED)  # noqa: S311 - lengths, the same in every run
    pace_s = _MEAN_TOKENS * settings["simulated_step_ms"] / 1000 / (_WORKERS * _SLOTS) / _LOAD
    submitted: list[_Told] = []
    polled: list[_Told] = []
    ids: list[str] = []
    unknown = 0
    async with HttpConnection(url) as connection, HttpConnection(url) as poller:
        warm = [await _submit(connection, chance) for _ in range(_WARM_JOBS)]
        for job in warm:
            await connection.get(f"/jobs/{job['id']}?wait=60")
        begin = time.monotonic()
        for number in range(num_jobs):
            await asyncio.sleep(max(0.0, begin + number * pace_s - time.monotonic()))
            job = await _submit(connection, chance)
            ids.append(job["id"])
            if job["eta_s"] is None:
                unknown += 1
            else:
                submitted.append(_Told(job["id"], job["eta_s"], job["created_at"]))
            if number % 3 == 0:
                asked = time.time()
                job = json.loads(await poller.get(f"/jobs/{chance.choice(ids)}"))
                # one that is almost done has nothing left to be wrong about
                if job["status"] == "queued" and job["eta_s"] is not None:
                    polled.append(_Told(job["id"], job["eta_s"], asked))
        say(f"{num_jobs} jobs submitted")
        finished = {}
        for id in ids:
            finished[id] = float(json.loads(await connection.get(f"/jobs/{id}?wait=60"))["finished_at"])
    return submitted, polled or submitted, unknown, finished


async def _submit(connection: HttpConnection, chance: random.Random) -> dict[str, Any]:
    tokens = min(_MOST_TOKENS, 1 + int(chance.expovariate(1 / _MEAN_TOKENS)))
    return await connection.post("/jobs", {"prompt": "Hello, I am", "max_tokens": tokens})


if __name__ == "__main__":
    run_bench("eta", __doc__, measure, engine="simulated")
