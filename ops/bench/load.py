"""What more load than the slots can do does to an instance: at twice and at ten times their rate, for a minute each.

Jobs are submitted on a timetable, each on a connection of its own, whether or not those before were answered. Every
answer is 202, or 503 with its reason; every 202 ends well; and as much gets done as when the queue is just never empty.
Jobs a second are those of the second half of each minute, when all slots have long been taken; memory is compared
between its begin and its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.report import Figure, at_least, at_most, percentile
from ops.instance import Role

_SLOTS: Final = 4
_STEP_MS: Final = 20
_TOKENS: Final = 20
_MOST_QUEUED: Final = 100
_FACTORS: Final = (2, 10)
#: So many jobs a second do the slots at best.
_RATE: Final = _SLOTS * 1000 / _STEP_MS / _TOKENS
#: The second where this machine is too busy to look at a request in time.
_REFUSALS: Final = ("503 queue_full", "503 server_busy")
_ROLES: Final[tuple[Role, ...]] = ("api", "worker")


@dataclass
class _Load:
    """What came of one load. `answers`: statuses with their codes; `took`: seconds of each answer."""

    ids: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)
    growth: dict[Role, float] = field(default_factory=dict)
    jobs_per_s: float = 0.0
    lost: int = 0

    @property
    def dishonest(self) -> int:
        """Answers that are neither an acceptance nor a refusal with its reason."""
        return sum(count for answer, count in self.answers.items() if answer not in ("202", *_REFUSALS))

    @property
    def refused(self) -> int:
        return sum(self.answers[answer] for answer in _REFUSALS)


def measure(options: Options) -> Findings:
    seconds = 4.0 if options.quick else 60.0
    settings = {
        **options.engine_settings,
        "simulated_step_ms": _STEP_MS,
        "max_batch_size": _SLOTS,
        "max_queued_jobs": _MOST_QUEUED,
    }
    say("starting an instance")
    with BenchInstance(settings) as instance:
        say("the rate at saturation")
        saturated = asyncio.run(_load(instance, 1.1, seconds))
        loads = {}
        for factor in _FACTORS:
            say(f"{factor} times that")
            loads[factor] = asyncio.run(_load(instance, factor, seconds))
    figures = [Figure("jobs/s at saturation", saturated.jobs_per_s, "jobs/s")]
    for factor, load in loads.items():
        name = f"at {factor} times the rate"
        figures += [
            Figure(f"jobs/s {name} / at saturation", load.jobs_per_s / saturated.jobs_per_s, "x", at_least(0.95)),
            Figure(f"answers other than 202 and an honest 503 {name}", float(load.dishonest), "answers", at_most(0)),
            Figure(f"accepted jobs that did not end well {name}", float(load.lost), "jobs", at_most(0)),
            Figure(f"accepted {name}", float(load.answers["202"]), "jobs"),
            Figure(f"refused {name}", float(load.refused), "answers"),
            Figure(f"95 % of the answers {name}", 1000 * percentile(load.took, 95), "ms"),
        ]
        figures += [
            Figure(f"growth of the {role} in the second half {name}", growth, "MB", at_most(5))
            for role, growth in load.growth.items()
        ]
    return Findings(figures, {**settings, "tokens": _TOKENS, "seconds": seconds})


async def _load(instance: BenchInstance, factor: float, seconds: float) -> _Load:
    """Submit so many times the slots' rate for so long, then wait until all that was accepted has ended."""
    load = _Load()
    processes = {role: instance.process(role) for role in _ROLES}
    begin, began_at = time.monotonic(), time.time()

    def resident() -> dict[Role, float]:
        return {role: process.memory_info().rss / 1e6 for role, process in processes.items()}

    async def halfway() -> dict[Role, float]:
        await asyncio.sleep(seconds / 2)
        return resident()

    async def submit(number: int) -> None:
        sent = time.monotonic()
        async with HttpConnection(instance.url) as connection:
            status, answer = await connection.try_post("/jobs", {"prompt": f"Job {number} is", "max_tokens": _TOKENS})
        load.took.append(time.monotonic() - sent)
        load.answers[_word(status, answer)] += 1
        if status == 202:
            load.ids.append(answer["id"])

    async with asyncio.TaskGroup() as group:
        half = group.create_task(halfway())
        for number in range(max(1, round(factor * _RATE * seconds))):
            await asyncio.sleep(max(0.0, begin + number / (factor * _RATE) - time.monotonic()))
            group.create_task(submit(number))
    load.growth = {role: size - half.result()[role] for role, size in resident().items()}
    async with HttpConnection(instance.url) as connection:
        jobs = [json.loads(await connection.get(f"/jobs/{id}?wait=60")) for id in load.ids]
    load.lost = sum(job["status"] != "succeeded" for job in jobs)
    rides = ((job["started_at"], job["finished_at"]) for job in jobs if job["status"] == "succeeded")
    load.jobs_per_s = jobs_per_s(rides, began_at + seconds / 2, began_at + seconds)
    return load


def jobs_per_s(rides: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Jobs a second from `start` to `end`, by when they began and ended, in seconds.

    One that rode only partly within that time counts as that part: jobs of one length end all at once, and to count
    ends would be wrong by as many as there are slots.
    """
    done = sum(max(0.0, min(end, last) - max(start, first)) / max(0.001, last - first) for first, last in rides)
    return done / (end - start)


def _word(status: int, answer: dict[str, Any]) -> str:
    return str(status) if status < 400 else f"{status} {answer.get('error', {}).get('code')}"


if __name__ == "__main__":
    run_bench("load", __doc__, measure, engine="simulated")
