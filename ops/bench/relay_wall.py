"""Where one API process ends: how many tokens a second it relays as server-sent events.

Writers play GPUs of four slots at 20 ms a step, through the script that workers use; every job is followed by a stream
of its own. There are more and more of them until what comes falls behind what is written. The writers, Redis and the
clients run on the same cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.full_slots import following
from ops.bench.instance import BenchInstance
from ops.bench.processor_time import PARTS, ProcessorClock
from ops.bench.report import Figure, percentile
from ops.bench.step_writers import SLOTS, Order, Writer, claim_gpus

_STEP_S: Final = 0.02
_GPUS: Final = (10, 20, 30, 40, 50, 60, 80, 100, 120)
_QUICK_GPUS: Final = (1, 2)
#: So much of what is written has to come while it is written.
_COMES: Final = 0.98
_WARM_S: Final = 1.0
_WINDOW_S: Final = 5.0
_QUICK_WINDOW_S: Final = 0.5
#: What a writer goes on for behind the window.
_AFTER_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Level:
    """One number of GPUs.

    Attributes:
        wanted, came: tokens/s that the GPUs make, and that the clients got.
        api_s: processor seconds of the API for 1,000 tokens.
        api_busy: cores that it used.
        event_bytes: bytes to a client for one token.
    """

    gpus: int
    wanted: float
    came: float
    api_s: float
    api_busy: float
    idle: float
    gap_ms: float
    event_bytes: float


def measure(options: Options) -> Findings:
    counts = _QUICK_GPUS if options.quick else _GPUS
    window_s = _QUICK_WINDOW_S if options.quick else _WINDOW_S
    levels: list[_Level] = []
    say("starting an instance")
    with BenchInstance({"engine": "simulated"}) as instance, ExitStack() as stack:
        gpus = claim_gpus(instance.redis_url, counts[-1])
        writer = stack.enter_context(Writer(instance.redis_url, gpus))
        for count in counts:
            ids = [rider.id for gpu in gpus[:count] for rider in gpu]
            level = asyncio.run(_level(instance, writer, count, ids, window_s))
            levels.append(level)
            say(f"{count} GPUs: {level.came:.0f} of {level.wanted:.0f} tokens/s")
            if level.came < _COMES * level.wanted:
                break
    most = max(levels, key=lambda level: level.came)
    figures = [
        Figure("most that one API process relayed", most.came, "tokens/s"),
        Figure("the API's processor time then", most.api_s, "s/1000 tokens"),
        Figure("to a client", most.event_bytes, "bytes/token"),
        *(figure for level in levels for figure in _figures(level)),
    ]
    setup = {"engine": "simulated", "slots": SLOTS, "step_ms": 1000 * _STEP_S, "window_s": window_s}
    return Findings(figures, setup)


async def _level(instance: BenchInstance, writer: Writer, count: int, ids: Sequence[str], window_s: float) -> _Level:
    async with following(instance.url, ids) as streams:
        clock = ProcessorClock(instance)
        writer.start(Order(count, _WARM_S + window_s + _AFTER_S, interval_s=_STEP_S))
        await asyncio.sleep(_WARM_S)
        streams.start()
        clock.start()
        before, bytes_before = streams.num_events, streams.num_bytes
        await asyncio.sleep(window_s)
        came, used = streams.num_events - before, clock.read()
        gaps_ms, num_bytes = streams.gaps_ms(), streams.num_bytes - bytes_before
        await asyncio.to_thread(writer.calls)
    api_s = used.parts[PARTS["api"]]
    return _Level(
        count,
        count * SLOTS / _STEP_S,
        came / used.seconds,
        1000 * api_s / max(1, came),
        api_s / used.seconds,
        used.idle,
        percentile(gaps_ms, 99) if gaps_ms else 0.0,
        num_bytes / max(1, came),
    )


def _figures(level: _Level) -> list[Figure]:
    name = f"{level.gpus} GPU{'s' * (level.gpus > 1)}"
    return [
        Figure(f"{name}: came", level.came, "tokens/s"),
        Figure(f"{name}: came / written", level.came / level.wanted, "x"),
        Figure(f"{name}: between tokens, 99th percentile", level.gap_ms, "ms"),
        Figure(f"{name}: API", level.api_s, "s/1000 tokens"),
        Figure(f"{name}: cores used by the API", level.api_busy, "cores"),
        Figure(f"{name}: idle", 100 * level.idle, "%"),
    ]


if __name__ == "__main__":
    run_bench("relay_wall", __doc__, measure, engine="simulated")
