"""Where one Redis ends: how many decoding steps a second its one thread takes, and how many GPUs that is.

Clients write steps of four slots through the script that workers use, each on a connection of its own, with a
subscriber on every job's channel and the append-only file on (fsync every second). There are more and more of them
until the rate no longer grows. Then entries of one token, as workers write them, and entries of five are measured in
turn (what workers would save that wrote only every fifth step), and calls of 64 slots, as of one large GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import psutil
import redis

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.instance import BenchInstance
from ops.bench.job_costs import end_jobs, heartbeats, pumps
from ops.bench.report import Figure, Target, at_least, median_of
from ops.bench.step_writers import SLOTS, Order, Subscriber, Writer, claim_gpus

#: A GPU's decoding step.
STEP_MS: Final = 20
#: Steps in one call, for the comparison.
GATHERED: Final = 5
#: Calls of four slots that become one of 64.
TOGETHER: Final = 16
#: That end with their first token, to see what a job takes besides its tokens; and as many pumps.
_JOBS: Final = 200
_FLEET: Final = 100
_TARGET: Final = at_least(100)
_PROCESSES: Final = 2
#: Each on a connection of its own.
_GPUS: Final = (2, 4, 8, 16, 32)
#: A level that brings less than this over the one before is the wall.
_GROWTH: Final = 1.03
_LOAD_S: Final = 4.0
_QUICK_LOAD_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Load:
    """What the server did under one load.

    Attributes:
        script_us: the script alone, by the server's own clock.
        processor_us: processor time of the whole server for one call.
        busy: cores that the server used.
        in_bytes, out_bytes, aof_bytes, memory_bytes: per token.
    """

    calls_per_s: float
    tokens_per_s: float
    script_us: float
    processor_us: float
    busy: float
    in_bytes: float
    out_bytes: float
    aof_bytes: float
    memory_bytes: float


class _Server:
    """What the server says of itself, and what the machine says of it."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)
        self._process = process
        # a rewrite in the middle of a load would be taken for the load's own bytes
        self._client.config_set("auto-aof-rewrite-percentage", 0)

    def close(self) -> None:
        self._client.close()

    def look(self) -> dict[str, float]:
        info: Mapping[str, Any] = self._client.info("everything")
        times = self._process.cpu_times()
        script = info.get("cmdstat_evalsha", {"usec": 0, "calls": 0})
        return {
            "script_us": float(script["usec"]),
            "script_calls": float(script["calls"]),
            "processor_us": 1e6 * (times.user + times.system),
            "in_bytes": float(info["total_net_input_bytes"]),
            "out_bytes": float(info["total_net_output_bytes"]),
            "aof_bytes": float(info["aof_current_size"]),
            "memory_bytes": float(info["used_memory_dataset"]),
        }


class _Bench:
    def __init__(self, writers: Sequence[Writer], subscriber: Subscriber, server: _Server, load_s: float) -> None:
        self._writers = writers
        self._subscriber = subscriber
        self._server = server
        self._load_s = load_s

    def load(self, gpus: int, tokens_per_entry: int = 1, together: int = 1) -> _Load:
        """The steps of so many GPUs, spread over the processes, for `load_s` seconds."""
        used = self._writers[: min(gpus, len(self._writers))]
        before, started = self._server.look(), time.perf_counter()
        for writer in used:
            writer.start(Order(gpus // len(used), self._load_s, tokens_per_entry, together=together))
        calls = sum(writer.calls() for writer in used)
        seconds, after = time.perf_counter() - started, self._server.look()
        slots = SLOTS * together
        self._subscriber.expect(calls * slots)
        did = {name: after[name] - before[name] for name in after}
        tokens = calls * slots * tokens_per_entry
        return _Load(
            calls / seconds,
            tokens / seconds,
            did["script_us"] / did["script_calls"],
            did["processor_us"] / calls,
            did["processor_us"] / (1e6 * seconds),
            did["in_bytes"] / tokens,
            did["out_bytes"] / tokens,
            did["aof_bytes"] / tokens,
            did["memory_bytes"] / tokens,
        )


def measure(options: Options) -> Findings:
    levels = _GPUS[:2] if options.quick else _GPUS
    load_s = _QUICK_LOAD_S if options.quick else _LOAD_S
    say("starting an instance")
    with BenchInstance({"engine": "simulated"}) as instance, ExitStack() as stack:
        gpus = claim_gpus(instance.redis_url, _GPUS[-1])
        subscriber = stack.enter_context(Subscriber(instance.redis_url, gpus))
        writers = [
            stack.enter_context(Writer(instance.redis_url, gpus[number::_PROCESSES])) for number in range(_PROCESSES)
        ]
        server = _Server(instance.redis_url, instance.process("redis"))
        stack.callback(server.close)
        bench = _Bench(writers, subscriber, server, load_s)
        job_figures = _job_figures(server, instance.redis_url)
        climbed = _climb(bench, levels)
        wall = max(climbed, key=lambda level: climbed[level])
        single: list[_Load] = []
        gathered: list[_Load] = []
        wide: list[_Load] = []
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            single.append(bench.load(wall))
            gathered.append(bench.load(wall, tokens_per_entry=GATHERED))
            wide.append(bench.load(_GPUS[-1], together=TOGETHER))
    figures = [
        *_figures(f"{SLOTS} slots, entries of 1 token", single, STEP_MS, _TARGET),
        *_figures(f"{SLOTS} slots, entries of {GATHERED} tokens", gathered, STEP_MS * GATHERED, None),
        *_figures(f"{SLOTS * TOGETHER} slots, entries of 1 token", wide, STEP_MS, None),
        *job_figures,
        *(Figure(f"{level} GPUs that write at once", rate, "calls/s") for level, rate in climbed.items()),
    ]
    setup = {"slots": SLOTS, "step_ms": STEP_MS, "gpus_at_once": wall, "seconds_each": load_s}
    return Findings(figures, {"engine": "simulated", **setup})


def _job_figures(server: _Server, redis_url: str) -> list[Figure]:
    start = server.look()
    end_jobs(redis_url, _JOBS)
    ended = server.look()
    heartbeats(redis_url, _FLEET)
    before = server.look()
    pumps(redis_url, _JOBS)
    pumped = server.look()
    name = "a job of one token, accepted, claimed and ended"
    return [
        Figure(f"{name}: scripts", (ended["script_us"] - start["script_us"]) / _JOBS, "us"),
        Figure(f"{name}: memory", (ended["memory_bytes"] - start["memory_bytes"]) / _JOBS, "bytes"),
        Figure(f"{name}: append-only file", (ended["aof_bytes"] - start["aof_bytes"]) / _JOBS, "bytes"),
        Figure(f"a pump with {_FLEET} workers", (pumped["script_us"] - before["script_us"]) / _JOBS, "us"),
    ]


def _climb(bench: _Bench, levels: Sequence[int]) -> dict[int, float]:
    """Calls/s of more and more GPUs that write at once, until more bring no more."""
    found: dict[int, float] = {}
    best = 0.0
    for level in levels:
        found[level] = bench.load(level).calls_per_s
        say(f"{level} GPUs at once: {found[level]:.0f} calls/s")
        if found[level] < best * _GROWTH:
            break
        best = found[level]
    return found


def _figures(name: str, loads: Sequence[_Load], interval_ms: int, target: Target | None) -> list[Figure]:
    """`interval_ms` is the time between two calls of one GPU."""
    rates = [load.calls_per_s for load in loads]
    gpus = [rate * interval_ms / 1000 for rate in rates]
    return [
        median_of(f"{name}: GPUs at {STEP_MS} ms a step", gpus, "GPUs", target),
        median_of(f"{name}: tokens", [load.tokens_per_s for load in loads], "tokens/s"),
        median_of(f"{name}: calls of the step script", rates, "calls/s"),
        median_of(f"{name}: script", [load.script_us for load in loads], "us/call"),
        median_of(f"{name}: processor time of the server", [load.processor_us for load in loads], "us/call"),
        median_of(f"{name}: cores used by the server", [load.busy for load in loads], "cores"),
        median_of(f"{name}: to the server", [load.in_bytes for load in loads], "bytes/token"),
        median_of(f"{name}: from the server", [load.out_bytes for load in loads], "bytes/token"),
        median_of(f"{name}: append-only file", [load.aof_bytes for load in loads], "bytes/token"),
        median_of(f"{name}: memory", [load.memory_bytes for load in loads], "bytes/token"),
    ]


if __name__ == "__main__":
    run_bench("redis_wall", __doc__, measure, engine="simulated")
