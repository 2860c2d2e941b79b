"""What more workers bring: tokens/s of 1, 2, 4, 8 and 16 workers whose four slots are full, on these cores.

The simulated engine takes 50 ms a step and no processor, so that each worker stands for a GPU of its own; everything
else is real. Each load is measured over a window in which every slot rides: as jobs that nobody follows, and as
streams. The load generator runs on the same cores. What the processor was used for stands beside the rate: where
nothing is idle it is the machine that ends, not the design.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import redis

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.full_slots import FullSlots, riding, streaming
from ops.bench.instance import BenchInstance
from ops.bench.processor_time import LOAD_GENERATOR, PARTS, ProcessorClock, ProcessorTime
from ops.bench.report import Figure, Target, at_least, median_of, percentile
from ops.errors import OperationError
from ops.private_instance import READY_S
from tasks import keys
from tasks.redis_clients import connect
from tasks.registry import list_workers
from tasks.settings import Settings

_WORKERS: Final = (1, 2, 4, 8, 16)
_QUICK_WORKERS: Final = (1, 2)
_SLOTS: Final = 4
_STEP_MS: Final = 50
_WINDOW_S: Final = 10.0
_QUICK_WINDOW_S: Final = 0.5
#: Nobody comes to the end of it.
_MAX_TOKENS: Final = 8000
_LOADS: Final = {"jobs": riding, "streams": streaming}
#: Linear growth is asked for while so much of the machine is idle: the cores are not what ends it then.
_IDLE: Final = 0.2
_TARGET: Final[Target] = at_least(0.95)
_PROBE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Window:
    """One load on so many workers."""

    tokens: int
    processor: ProcessorTime
    gaps_ms: Sequence[float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.processor.seconds


Rounds = dict[tuple[str, int], list[_Window]]


def measure(options: Options) -> Findings:
    counts = _QUICK_WORKERS if options.quick else _WORKERS
    window_s = _QUICK_WINDOW_S if options.quick else _WINDOW_S
    settings = {"engine": "simulated", "simulated_step_ms": _STEP_MS, "max_batch_size": _SLOTS}
    found: Rounds = {(load, count): [] for load in _LOADS for count in counts}
    for number in range(options.rounds):
        # the machine changes with time: no number of workers has always the same place in a round
        for count in counts if number % 2 == 0 else reversed(counts):
            say(f"round {number + 1} of {options.rounds}: {count} worker{'s' * (count > 1)}")
            with BenchInstance({**settings, "workers": count}) as instance:
                _await_workers(instance.redis_url, count)
                clock = ProcessorClock(instance)
                for load in _LOADS:
                    found[load, count].append(asyncio.run(_window(instance, load, count, clock, window_s)))
    setup = {**settings, "workers": counts, "window_s": window_s, "max_tokens": _MAX_TOKENS}
    return Findings([figure for load in _LOADS for figure in _figures(load, counts, found)], setup)


def _await_workers(redis_url: str, count: int) -> None:
    """Until so many workers are ready; an instance counts as ready with its first."""
    until = time.monotonic() + READY_S
    with connect(Settings(redis_url=redis_url)) as client:
        while sum(worker.state == "ready" for worker in list_workers(client)) < count:
            if time.monotonic() > until:
                raise OperationError(
                    f"Not all of {count} workers were ready within {READY_S:g} s", "Run it on a quiet machine"
                )
            time.sleep(_PROBE_S)  # a heartbeat is a key: nothing can be waited for


async def _window(instance: BenchInstance, load: str, count: int, clock: ProcessorClock, window_s: float) -> _Window:
    async with _LOADS[load](instance.url, count * _SLOTS, _MAX_TOKENS) as slots:
        with connect(Settings(redis_url=instance.redis_url)) as client:
            ids = slots.ids or _riding_ids(client, count * _SLOTS)
            slots.start()
            clock.start()
            before = _tokens(client, ids)
            await asyncio.sleep(window_s)
            tokens, processor = _tokens(client, ids) - before, clock.read()
        gaps_ms = _gaps(slots, load)
        return _Window(tokens, processor, gaps_ms)


def _gaps(slots: FullSlots, load: str) -> list[float]:
    gaps_ms = slots.gaps_ms()
    if load == "streams" and not gaps_ms:
        raise OperationError("The streams brought no token", "Look at the API's log")
    return gaps_ms


def _riding_ids(client: redis.Redis, count: int) -> list[str]:
    """Of all jobs that are not over."""
    ids = [str(id) for id in client.zrange(keys.DUE, 0, -1)]
    if len(ids) != count:
        raise OperationError(f"{len(ids)} jobs ride where {count} should", "Run it on a quiet machine")
    return ids


def _tokens(client: redis.Redis, ids: Sequence[str]) -> int:
    """Tokens that the ledger holds of these jobs."""
    pipeline = client.pipeline(transaction=False)
    for id in ids:
        pipeline.hget(keys.record(id), "k")
    answers: list[Any] = pipeline.execute()
    return sum(map(int, answers))


def _figures(load: str, counts: Sequence[int], found: Rounds) -> list[Figure]:
    alone = [window.tokens_per_s for window in found[load, counts[0]]]
    figures: list[Figure] = []
    judged: list[float] = []  # one worker is what linear is counted from: it is always among them
    for count in counts:
        windows = found[load, count]
        name = f"{load}, {count} worker{'s' * (count > 1)}"
        ratios = [window.tokens_per_s / (count * one) for window, one in zip(windows, alone, strict=True)]
        idle = median_of(f"{name}: idle", [100 * window.processor.idle for window in windows], "%")
        if count == counts[0] or idle.value >= 100 * _IDLE:
            judged.append(median(ratios))
        figures += [
            median_of(f"{name}: throughput", [window.tokens_per_s for window in windows], "tokens/s"),
            median_of(f"{name} / linear", ratios, "x"),
            idle,
            *_processor_figures(name, windows),
            *_gap_figures(name, windows),
        ]
    title = f"{load}: least of linear, where a fifth of the processor is idle"
    return [Figure(title, min(judged), "x", _TARGET, tuple(judged)), *figures]


def _processor_figures(name: str, windows: Sequence[_Window]) -> list[Figure]:
    return [
        median_of(
            f"{name}: {part}",
            [1000 * window.processor.parts[part] / window.tokens for window in windows],
            "s/1000 tokens",
        )
        for part in (*PARTS.values(), LOAD_GENERATOR)
    ]


def _gap_figures(name: str, windows: Sequence[_Window]) -> list[Figure]:
    if not all(window.gaps_ms for window in windows):
        return []
    return [
        median_of(f"{name}: between tokens, {percent}th percentile", values, "ms")
        for percent in (50, 99)
        for values in [[percentile(window.gaps_ms, percent) for window in windows]]
    ]


if __name__ == "__main__":
    run_bench("scale", __doc__, measure, engine="simulated")
