"""What riding sequences do to clients that poll: 100 of them, while nothing rides and while four sequences do.

Two ways to poll: each client asks once a second, as people's scripts do; and each asks again as soon as it has its
answer, which keeps the API's one core busy, so that the time is that of the queue in front of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.report import at_most, median_of, percentile, ratio_of

_CLIENTS: Final = 100
_RIDERS: Final = 4
_EVERY_S: Final = 1.0
#: More than are generated while anybody polls; the riders are cancelled then.
_RIDER_TOKENS: Final = 8000
_STEP_MS: Final = 20
_TARGET: Final = at_most(2)


@dataclass(frozen=True, slots=True)
class _Polled:
    """95th percentiles in ms."""

    paced: float
    at_once: float


def measure(options: Options) -> Findings:
    polls = 2 if options.quick else 10
    settings = {**options.engine_settings, "max_batch_size": _RIDERS, "max_tokens": _RIDER_TOKENS}
    if options.engine == "simulated":
        settings["simulated_step_ms"] = _STEP_MS
    idle: list[_Polled] = []
    riding: list[_Polled] = []
    say("starting an instance")
    with BenchInstance(settings) as instance:
        asyncio.run(_round(instance.url, 1, ride=False))
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            idle.append(asyncio.run(_round(instance.url, polls, ride=False)))
            riding.append(asyncio.run(_round(instance.url, polls, ride=True)))
    figures = []
    for name, field in (("once a second", "paced"), ("at once again", "at_once")):
        quiet, busy = ([float(getattr(one, field)) for one in side] for side in (idle, riding))
        figures += [
            ratio_of(f"p95 of {_CLIENTS} clients that ask {name}: riding / idle", busy, quiet, _TARGET),
            median_of(f"p95 of clients that ask {name}, idle", quiet, "ms"),
            median_of(f"p95 of clients that ask {name}, {_RIDERS} riding", busy, "ms"),
        ]
    return Findings(figures, {**settings, "clients": _CLIENTS, "polls_each": polls})


async def _round(url: str, polls: int, *, ride: bool) -> _Polled:
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(HttpConnection(url)) for _ in range(_CLIENTS)]
        ids = await stack.enter_async_context(_jobs(url, ride=ride))
        return _Polled(await _poll(connections, ids, polls, _EVERY_S), await _poll(connections, ids, 4 * polls, 0.0))


@asynccontextmanager
async def _jobs(url: str, *, ride: bool) -> AsyncIterator[Sequence[str]]:
    """Jobs to ask for: some that ride until the end of the block, or as many that have ended."""
    async with HttpConnection(url) as connection:
        body = {"prompt": "Hello, I am", "max_tokens": _RIDER_TOKENS if ride else _RIDERS}
        ids = [str((await connection.post("/jobs", body))["id"]) for _ in range(_RIDERS)]
        for id in ids:
            if ride:
                while b'"status":"running"' not in await connection.get(f"/jobs/{id}"):  # noqa: ASYNC110 - as a client
                    await asyncio.sleep(0.01)
            else:
                await connection.get(f"/jobs/{id}?wait=60")
    yield ids
    if ride:
        async with HttpConnection(url) as connection:
            for id in ids:
                await connection.post(f"/jobs/{id}/cancel", {})
                await connection.get(f"/jobs/{id}?wait=60")


async def _poll(connections: Sequence[HttpConnection], ids: Sequence[str], polls: int, every_s: float) -> float:
    """95th percentile of so many polls of each client, in ms; with a pace the clients are spread over it."""
    took: list[float] = []
    begin = asyncio.get_running_loop().time()

    async def client(number: int, connection: HttpConnection) -> None:
        for poll in range(polls):
            wait_s = begin + every_s * (poll + number / len(connections)) - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, wait_s))
            started = time.perf_counter()
            await connection.get(f"/jobs/{ids[number % len(ids)]}")
            took.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as group:
        for number, connection in enumerate(connections):
            group.create_task(client(number, connection))
    return 1000 * percentile(took, 95)


if __name__ == "__main__":
    run_bench("polling", __doc__, measure, engine="simulated")
