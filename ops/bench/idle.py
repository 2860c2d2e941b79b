"""What many who wait cost: a thousand long polls and a thousand open streams on one API process, submissions beside.

Each waits for a job of its own in a queue behind one that takes long. Measured are the API's memory, the connections of
Redis, and how long a submission takes, before they come and while they wait.
"""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import AsyncExitStack
from typing import Final

import redis

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.report import Figure, at_most, percentile
from ops.errors import OperationError

#: The one job that rides goes on for as long as anybody measures.
_SETTINGS: Final = {"engine": "simulated", "max_batch_size": 1, "simulated_step_ms": 1000}
_RIDER_TOKENS: Final = 4000
_SUBMISSIONS: Final = 200
_EVERY_S: Final = 0.05
_OPENERS: Final = 50
#: Files beside the connections.
_SPARE_FILES: Final = 200


def measure(options: Options) -> Findings:
    waiting = 50 if options.quick else 1000
    submissions = 20 if options.quick else _SUBMISSIONS
    # the client's own ends and the server's, each in a process of its own, which inherits this
    _allow_files(2 * waiting + _SPARE_FILES)
    say("starting an instance")
    with BenchInstance(_SETTINGS) as instance, redis.Redis.from_url(instance.redis_url) as client:
        api = instance.process("api")

        def resident() -> float:
            return float(api.memory_info().rss) / 1e6

        def connections() -> int:
            return int(client.info("clients")["connected_clients"])

        async def run() -> tuple[list[float], list[float], list[float], list[float]]:
            async with AsyncExitStack() as stack:
                submitter = await stack.enter_async_context(HttpConnection(instance.url))
                await submitter.post("/jobs", {"prompt": "x", "max_tokens": _RIDER_TOKENS})
                ids = await _queue(instance.url, waiting)
                quiet = await _submit(submitter, submissions)
                before = [resident(), connections()]
                say(f"{waiting} polls and {waiting} streams")
                async with asyncio.TaskGroup() as opening:
                    turns = asyncio.Semaphore(_OPENERS)
                    for id in ids:
                        opening.create_task(_open_stream(stack, instance.url, id, turns))
                polls = [asyncio.create_task(_poll(stack, instance.url, id, turns)) for id in ids]
                await asyncio.sleep(2)  # until all of them are answered by nothing
                busy = await _submit(submitter, submissions)
                after = [resident(), connections()]
                ended = [poll for poll in polls if poll.done()]
                for poll in polls:
                    poll.cancel()
                await asyncio.gather(*polls, return_exceptions=True)
                if ended:
                    raise OperationError(f"{len(ended)} polls did not wait", "Look at the API's log")
            return quiet, busy, before, after

        quiet, busy, before, after = asyncio.run(run())
    figures = [
        Figure(f"95 % of submissions, {waiting} polls and streams open", percentile(busy, 95), "ms", at_most(50)),
        Figure("95 % of submissions, nobody waiting", percentile(quiet, 95), "ms"),
        Figure("memory of the API for each of them", 500 * (after[0] - before[0]) / waiting, "kB", at_most(100)),
        Figure("memory of the API with them", after[0], "MB"),
        Figure("connections of Redis with them", after[1], "connections", at_most(100)),
        Figure("connections of Redis before", before[1], "connections"),
    ]
    return Findings(figures, {**_SETTINGS, "polls": waiting, "streams": waiting, "submissions": submissions})


def _allow_files(count: int) -> None:
    """Raises OperationError where so many open files are not to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OperationError(f"{count} open files are needed, and {hard} may be", "Raise it: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def _queue(url: str, count: int) -> list[str]:
    """So many jobs that wait."""
    async with HttpConnection(url) as connection:
        body = {"prompt": "Hello, I am", "max_tokens": 5}
        return [str((await connection.post("/jobs", body))["id"]) for _ in range(count)]


async def _submit(connection: HttpConnection, count: int) -> list[float]:
    """Ms of each of so many submissions, one after the other at a steady pace."""
    took = []
    begin = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, begin + number * _EVERY_S - time.monotonic()))
        sent = time.perf_counter()
        await connection.post("/jobs", {"prompt": "Hello, I am", "max_tokens": 5})
        took.append(1000 * (time.perf_counter() - sent))
    return took


async def _open_stream(stack: AsyncExitStack, url: str, id: str, turns: asyncio.Semaphore) -> None:
    """A burst of thousands would measure the listening socket's queue, hence the turns."""
    async with turns:
        connection = await stack.enter_async_context(HttpConnection(url))
        await connection.open_stream(f"/jobs/{id}/stream")


async def _poll(stack: AsyncExitStack, url: str, id: str, turns: asyncio.Semaphore) -> None:
    async with turns:
        connection = await stack.enter_async_context(HttpConnection(url))
    await connection.get(f"/jobs/{id}?wait=60")


if __name__ == "__main__":
    run_bench("idle", __doc__, measure, engine="simulated")
