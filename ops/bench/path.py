"""What the path costs: tokens/s of streaming clients through HTTP, Redis, Celery and SSE, against the engine alone.

Both sides have the same weights, prompts, lengths and sampling, and are measured in turn; the clients run on the same
cores as everything else.
"""

from __future__ import annotations

from typing import Final

from ops.bench.clients import StreamLoad, stream_side_by_side
from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.engine_loop import EngineLoop, Ran
from ops.bench.instance import BenchInstance
from ops.bench.prompts import stream_bodies
from ops.bench.report import at_least, median_of, ratio_of

CLIENTS: Final = 4
MAX_TOKENS: Final = 50
_QUICK_TOKENS: Final = 5
_TARGET: Final = at_least(0.9)


def measure(options: Options) -> Findings:
    max_tokens = _QUICK_TOKENS if options.quick else MAX_TOKENS
    settings = {**options.engine_settings, "max_batch_size": CLIENTS}
    alone: list[Ran] = []
    whole: list[StreamLoad] = []
    say("loading the engine, and an instance beside it")
    with EngineLoop(settings) as loop, BenchInstance(settings) as instance:
        bodies = stream_bodies(CLIENTS, max_tokens, loop.loaded.eos_ids)
        loop.run(bodies)
        stream_side_by_side(instance.url, CLIENTS, bodies)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            # the one that goes first may find the machine in another state
            if number % 2:
                whole.append(stream_side_by_side(instance.url, CLIENTS, bodies))
            alone.append(loop.run(bodies))
            if not number % 2:
                whole.append(stream_side_by_side(instance.url, CLIENTS, bodies))
        loaded = loop.loaded
    ours, bare = [load.tokens_per_s for load in whole], [run.tokens_per_s for run in alone]
    first_tokens = [1000 * (stream.first_token - stream.started) for load in whole for stream in load.streams]
    figures = [
        ratio_of("path / engine alone", ours, bare, _TARGET),
        median_of("tokens/s through the path", ours, "tokens/s"),
        median_of("tokens/s of the engine alone", bare, "tokens/s"),
        median_of("first token through the path", first_tokens, "ms"),
    ]
    setup = {
        "clients": CLIENTS,
        "slots": CLIENTS,
        "max_tokens": max_tokens,
        "device": loaded.device,
        "dtype": loaded.dtype,
    }
    return Findings(figures, setup)


if __name__ == "__main__":
    run_bench("path", __doc__, measure, engine="transformers")
