"""Memory of the processes that serve: the worker's parent and the API, at the start and over 1,000 jobs.

Resident sets in millions of bytes, on the simulated engine: neither process ever holds a model. The load is a mixture
of streams, synchronous requests and jobs that are polled.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import psutil

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.report import Figure, Target, at_most
from ops.instance import Role

_SETTINGS: Final = {"engine": "simulated", "simulated_step_ms": 0}
_CLIENTS: Final = 6
_TOKENS: Final = 20
_SAMPLES: Final = 10
#: Caches and allocators fill up within so many of the samples; growth is counted from there.
_WARM_SAMPLES: Final = 2
_ROLES: Final[dict[Role, tuple[str, Target]]] = {
    "worker": ("worker's parent process", at_most(250)),
    "api": ("API", at_most(150)),
}
#: What may come on top between the second hundred of jobs and the tenth.
_GROWTH_MB: Final = at_most(5)


def measure(options: Options) -> Findings:
    num_jobs = 60 if options.quick else 1000
    resident: dict[Role, list[float]] = {role: [] for role in _ROLES}
    say("starting an instance")
    with BenchInstance(_SETTINGS) as instance:
        processes = {role: instance.process(role) for role in _ROLES}
        _note(resident, processes)
        for number in range(_SAMPLES):
            asyncio.run(_jobs(instance.url, num_jobs // _SAMPLES))
            _note(resident, processes)
            say(f"{(number + 1) * num_jobs // _SAMPLES} jobs")
    figures: list[Figure] = []
    for role, (name, target) in _ROLES.items():
        samples = resident[role]
        growth = samples[-1] - samples[_WARM_SAMPLES]
        figures += [
            Figure(f"{name} at the start", samples[0], "MB"),
            Figure(f"{name}, the most over {num_jobs} jobs", max(samples), "MB", target, tuple(samples)),
            Figure(f"{name}, growth over the last {num_jobs * 8 // 10} jobs", growth, "MB", _GROWTH_MB),
        ]
    return Findings(figures, {**_SETTINGS, "jobs": num_jobs, "clients": _CLIENTS, "max_tokens": _TOKENS})


def _note(resident: dict[Role, list[float]], processes: dict[Role, psutil.Process]) -> None:
    for role, process in processes.items():
        resident[role].append(process.memory_info().rss / 1e6)


async def _jobs(url: str, count: int) -> None:
    """So many jobs, each of which has ended when this returns."""
    left = iter(range(count))

    async def client() -> None:
        async with HttpConnection(url) as connection:
            for number in left:
                await _job(connection, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_CLIENTS, count)):
            group.create_task(client())


async def _job(connection: HttpConnection, number: int) -> None:
    body: dict[str, Any] = {"prompt": f"Job number {number} is", "max_tokens": _TOKENS}
    match number % 3:
        case 0:
            await connection.stream("/generate_stream", body)
        case 1:
            await connection.post("/basic_generate", body)
        case _:
            job = await connection.post("/jobs", body)
            await connection.get(f"/jobs/{job['id']}?wait=60")


if __name__ == "__main__":
    run_bench("memory", __doc__, measure, engine="simulated")
