"""Carpool against the source design, re-implemented: same weights, number format, prompts and lengths, in turn.

Streams at 10 clients, where the source computes every text again for each token, with its batch of 4; `/basic_generate`
at 1, 4 and 10 clients, where it serves one prompt at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self

from ops.bench.clients import generate_side_by_side, stream_side_by_side
from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.engine_loop import EngineLoop
from ops.bench.instance import BenchInstance
from ops.bench.prompts import generate_bodies, stream_bodies
from ops.bench.report import Figure, Target, at_least, median_of, more_than, ratio_of
from ops.client import ApiClient
from ops.embedded_redis import free_port
from ops.errors import OperationError
from ops.private_instance import READY_S
from ops.process import with_parent_death_signal

STREAM_CLIENTS: Final = 10
#: Streams are as long as those of `ops/bench/path.py`; shorter ones are the source's own default.
STREAM_TOKENS: Final = 50
SHORT_STREAM_TOKENS: Final = 20
GENERATE_TOKENS: Final = 50
#: Clients of `/basic_generate`, and how many requests they send: whole batches, or the last one would be half empty.
GENERATE_LOADS: Final = {1: 2, 4: 4, 10: 12}
#: How many streams, for the same reason.
STREAM_LOADS: Final = {4: 12, 10: 20}
#: The source's batch has this size, and so has ours unless we say otherwise.
SLOTS: Final = 4
MORE_SLOTS: Final = 10
_QUICK_TOKENS: Final = 3
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
    """Figures of one load on both sides, round by round.

    Args:
        source_slots: batch size of the source design's service.
    """

    def __init__(
        self, name: str, unit: str, run: Callable[[str], float], target: Target | None = None, source_slots: int = SLOTS
    ) -> None:
        self.source_slots = source_slots
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self._name, self._unit, self._run, self._target = name, unit, run, target

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

    def streams(slots: int, tokens: int) -> Callable[[str], float]:
        bodies = stream_bodies(STREAM_LOADS[slots], _QUICK_TOKENS if options.quick else tokens, loaded.eos_ids)
        return lambda url: stream_side_by_side(url, STREAM_CLIENTS, bodies).tokens_per_s

    def generate(clients: int) -> Callable[[str], float]:
        tokens = _QUICK_TOKENS if options.quick else GENERATE_TOKENS
        bodies = generate_bodies(GENERATE_LOADS[clients], tokens, loaded.eos_ids)
        return lambda url: generate_side_by_side(url, clients, bodies)

    name, unit = f"{STREAM_CLIENTS} streams at {{}} slots", "tokens/s"
    generates = {
        clients: Comparison(
            f"basic_generate at {clients} clients",
            "requests/s",
            generate(clients),
            at_least(4) if clients == max(GENERATE_LOADS) else None,
        )
        for clients in GENERATE_LOADS
    }
    at_slots = [
        Comparison(name.format(SLOTS), unit, streams(SLOTS, STREAM_TOKENS), at_least(2.4)),
        Comparison(f"{name.format(SLOTS)}, short", unit, streams(SLOTS, SHORT_STREAM_TOKENS)),
        *generates.values(),
    ]
    more = streams(MORE_SLOTS, STREAM_TOKENS)
    at_more_slots = [
        Comparison(name.format(MORE_SLOTS), unit, more, at_least(4)),
        Comparison(f"{name.format(MORE_SLOTS)} on both sides", unit, more, source_slots=MORE_SLOTS),
    ]
    _compare(options, SLOTS, at_slots)
    _compare(options, MORE_SLOTS, at_more_slots)
    growth = ratio_of(
        f"basic_generate: Carpool at {SLOTS} clients / at 1", generates[SLOTS].ours, generates[1].ours, more_than(1)
    )
    setup = {
        "stream_clients": STREAM_CLIENTS,
        "stream_tokens": STREAM_TOKENS,
        "short_stream_tokens": SHORT_STREAM_TOKENS,
        "generate_tokens": GENERATE_TOKENS,
        "source_slots": SLOTS,
        "device": loaded.device,
        "dtype": loaded.dtype,
    }
    return Findings([*(figure for one in (*at_slots, *at_more_slots) for figure in one.figures()), growth], setup)


def _compare(options: Options, slots: int, comparisons: Sequence[Comparison]) -> None:
    """Measure each comparison in turn, Carpool with so many slots."""
    settings = options.engine_settings
    say(f"starting the services, Carpool with {slots} slots")
    with ExitStack() as stack:
        sources = {
            source_slots: stack.enter_context(SourceService(settings, source_slots)).url
            for source_slots in sorted({comparison.source_slots for comparison in comparisons})
        }
        ours = stack.enter_context(BenchInstance({**settings, "max_batch_size": slots})).url
        for url in (*sources.values(), ours):
            stream_side_by_side(url, slots, stream_bodies(slots, 2, ()))
            generate_side_by_side(url, 1, generate_bodies(1, 2, ()))
        for number in range(options.rounds):
            say(f"{slots} slots, round {number + 1} of {options.rounds}")
            for comparison in comparisons:
                # the one that goes first may find the machine in another state
                comparison.measure(ours, sources[comparison.source_slots], ours_first=bool(number % 2))


if __name__ == "__main__":
    run_bench("source_design", __doc__, measure, engine="transformers")
