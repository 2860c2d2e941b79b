"""Carpool against the source design, re-implemented: same weights, number format, prompts and lengths, in turn.

Streams at 10 clients, where the source computes every text again for each token; `/basic_generate` at 1, 4 and 10
clients, where it serves one prompt at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from ops.bench.clients import generate_side_by_side, stream_side_by_side
from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.engine_loop import EngineLoop
from ops.bench.instance import READY_S, BenchInstance
from ops.bench.prompts import generate_bodies, stream_bodies
from ops.bench.report import Figure, Target, at_least, median_of, more_than, ratio_of
from ops.client import ApiClient
from ops.embedded_redis import free_port
from ops.errors import OperationError
from ops.process import with_parent_death_signal

STREAM_CLIENTS: Final = 10
STREAM_TOKENS: Final = 20
GENERATE_TOKENS: Final = 50
#: Slots of both sides, and how many times the source's tokens/s are wanted.
SLOTS: Final = {4: at_least(2.4), 10: at_least(4)}
#: Clients of `/basic_generate`, and how many requests they send: whole batches, or the last one would be half empty.
GENERATE_LOADS: Final = {1: 2, 4: 4, 10: 12}
_GENERATE_SLOTS: Final = 4
_GENERATE_TARGET: Final = at_least(4)
#: More clients, up to the slots, have to give more requests/s.
_GROWS: Final = more_than(1)
_STOP_S: Final = 15.0


class SourceService:
    """`ops/bench/source_service.py` as a process that ends with the block, and with this process."""

    def __init__(self, settings: dict[str, Any], batch_size: int) -> None:
        self._port = free_port()
        self._arguments = (str(self._port), str(batch_size), json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "ops.bench.source_service", *self._arguments]
        self._process = subprocess.Popen(
            with_parent_death_signal(command, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            env=os.environ,
            start_new_session=True,
        )
        try:
            self._await_ready(self._process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if process.poll() is not None:
                break
            with suppress(OperationError), ApiClient(self.url) as client:
                client.get("/health/ready")
                return
            time.sleep(0.1)  # a process of its own, which has no way to call us
        raise OperationError("The source design's service did not start; its output stands above", "")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its model worker sees the end of its pipe
            process.wait()


class Comparison:
    """Figures of one load on both sides, round by round."""

    def __init__(self, name: str, unit: str, run: Callable[[str], float], target: Target | None) -> None:
        self._name, self._unit, self._run, self._target = name, unit, run, target
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def measure(self, ours: str, theirs: str, *, ours_first: bool) -> None:
        """One round, against these two addresses."""
        if ours_first:
            self.ours.append(self._run(ours))
        self.theirs.append(self._run(theirs))
        if not ours_first:
            self.ours.append(self._run(ours))

    def figures(self) -> list[Figure]:
        return [
            median_of(f"{self._name}: Carpool", self.ours, self._unit),
            median_of(f"{self._name}: source design", self.theirs, self._unit),
            ratio_of(f"{self._name}: Carpool / source design", self.ours, self.theirs, self._target),
        ]


def measure(options: Options) -> Findings:
    say("loading the engine once, for its end-of-sequence tokens")
    with EngineLoop(options.engine_settings) as loop:
        loaded = loop.loaded
    stream_tokens = 3 if options.quick else STREAM_TOKENS
    generate_tokens = 3 if options.quick else GENERATE_TOKENS
    figures: list[Figure] = []
    for slots, target in SLOTS.items():
        comparisons = [_streams(slots, stream_tokens, loaded.eos_ids, target)]
        generates: dict[int, Comparison] = {}
        if slots == _GENERATE_SLOTS:
            generates = {clients: _generates(clients, generate_tokens, loaded.eos_ids) for clients in GENERATE_LOADS}
        _compare(options, slots, [*comparisons, *generates.values()])
        figures += [figure for one in (*comparisons, *generates.values()) for figure in one.figures()]
        if generates:
            name = f"basic_generate: Carpool at {slots} clients / at 1"
            figures.append(ratio_of(name, generates[slots].ours, generates[1].ours, _GROWS))
    setup = {
        "stream_clients": STREAM_CLIENTS,
        "stream_tokens": stream_tokens,
        "generate_tokens": generate_tokens,
        "device": loaded.device,
        "dtype": loaded.dtype,
    }
    return Findings(figures, setup)


def _streams(slots: int, max_tokens: int, eos_ids: Sequence[int], target: Target) -> Comparison:
    count = 2 * STREAM_CLIENTS  # whole batches, at 4 slots and at 10
    bodies = stream_bodies(count, max_tokens, eos_ids)

    def run(url: str) -> float:
        return stream_side_by_side(url, STREAM_CLIENTS, bodies).tokens_per_s

    return Comparison(f"{STREAM_CLIENTS} streams at {slots} slots", "tokens/s", run, target)


def _generates(clients: int, max_tokens: int, eos_ids: Sequence[int]) -> Comparison:
    bodies = generate_bodies(GENERATE_LOADS[clients], max_tokens, eos_ids)

    def run(url: str) -> float:
        return generate_side_by_side(url, clients, bodies)

    target = _GENERATE_TARGET if clients == max(GENERATE_LOADS) else None
    return Comparison(f"basic_generate at {clients} clients", "requests/s", run, target)


def _compare(options: Options, slots: int, comparisons: Sequence[Comparison]) -> None:
    """Measure each comparison in turn, on a pair of services of so many slots."""
    settings = options.engine_settings
    say(f"starting both services, {slots} slots each")
    with SourceService(settings, slots) as source, BenchInstance({**settings, "max_batch_size": slots}) as instance:
        warm_up = stream_bodies(slots, 2, ())
        for url in (source.url, instance.url):
            stream_side_by_side(url, slots, warm_up)
            generate_side_by_side(url, 1, generate_bodies(1, 2, ()))
        for number in range(options.rounds):
            say(f"{slots} slots, round {number + 1} of {options.rounds}")
            for comparison in comparisons:
                # the one that goes first may find the machine in another state
                comparison.measure(instance.url, source.url, ours_first=bool(number % 2))


if __name__ == "__main__":
    run_bench("source_design", __doc__, measure, engine="transformers")
