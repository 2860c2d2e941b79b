"""How long a token is on its way where the engine takes no time: to the first token, and from one job to the next.

The first token over HTTP is compared with the sum of the hops that nobody can save, measured in turn with it. A slot's
refill is the time from the end of one job, as it is published, to the first token of the next one that waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ops.bench.command import Findings, Options, run_bench, say
from ops.bench.hops import SETTLE_S, Hops, HopTimes
from ops.bench.http_client import HttpConnection
from ops.bench.instance import BenchInstance
from ops.bench.refill import refill_times
from ops.bench.report import Figure, at_most, median_of, percentile, ratio_of

_SETTINGS: Final = {"engine": "simulated", "simulated_step_ms": 0}
_STREAM_TOKENS: Final = 4
_FLOOR_FACTOR: Final = at_most(2)
_FIRST_TOKEN_MS: Final = at_most(15)
_REFILL_MS: Final = at_most(20)
#: The hops of the floor, by their field in `HopTimes`.
_FLOOR: Final = {
    "http": "HTTP no-op",
    "accept": "accept script",
    "broker": "broker hop (kombu)",
    "pipe": "queue hop, there and back",
    "publish": "publish",
}


@dataclass(frozen=True, slots=True)
class _Round:
    """Streams, and the hops between them."""

    hops: list[HopTimes]
    first_tokens: list[float]

    def median_ms(self, hop: str) -> float:
        return 1000 * float(median(getattr(times, hop) for times in self.hops))

    @property
    def floor_ms(self) -> float:
        return sum(map(self.median_ms, _FLOOR))

    @property
    def first_token_ms(self) -> float:
        return 1000 * median(self.first_tokens)


def measure(options: Options) -> Findings:
    per_round = 5 if options.quick else 60
    say("starting an instance of 4 slots")
    with BenchInstance(_SETTINGS) as instance, Hops(instance.redis_url) as hops:
        asyncio.run(_round(instance.url, hops, per_round))
        rounds = []
        for number in range(options.rounds):
            say(f"first token, round {number + 1} of {options.rounds}")
            rounds.append(asyncio.run(_round(instance.url, hops, per_round)))
    refills: list[float] = []
    say("starting an instance of 1 slot")
    with BenchInstance({**_SETTINGS, "max_batch_size": 1}) as instance:
        for number in range(options.rounds):
            say(f"refill, round {number + 1} of {options.rounds}")
            refills += refill_times(instance.url, instance.redis_url, 5 if options.quick else 40)
    figures = [*_first_token_figures(rounds), *_refill_figures([1000 * sample for sample in refills])]
    return Findings(figures, {**_SETTINGS, "streams_per_round": per_round, "stream_tokens": _STREAM_TOKENS})


async def _round(url: str, hops: Hops, count: int) -> _Round:
    """Every hop and one stream, and again."""
    body = {"prompt": "Hello, I am", "max_tokens": _STREAM_TOKENS}
    found = _Round([], [])
    async with HttpConnection(url) as connection:
        for _ in range(count):
            found.hops.append(await hops.measure(connection))
            await asyncio.sleep(SETTLE_S)
            stream = await connection.stream("/generate_stream", body)
            found.first_tokens.append(stream.first_token - stream.started)
            await asyncio.sleep(SETTLE_S)
    return found


def _first_token_figures(rounds: Sequence[_Round]) -> list[Figure]:
    first_ms, floor_ms = [one.first_token_ms for one in rounds], [one.floor_ms for one in rounds]
    every = [1000 * sample for one in rounds for sample in one.first_tokens]
    return [
        median_of("first token", first_ms, "ms", _FIRST_TOKEN_MS),
        ratio_of("first token / floor", first_ms, floor_ms, _FLOOR_FACTOR),
        Figure("first token, 95th percentile", percentile(every, 95), "ms"),
        median_of("floor", floor_ms, "ms"),
        *(median_of(f"floor: {name}", [one.median_ms(hop) for one in rounds], "ms") for hop, name in _FLOOR.items()),
        median_of("beside it: LPUSH and BRPOP alone", [one.median_ms("plain_list") for one in rounds], "ms"),
    ]


def _refill_figures(refills: Sequence[float]) -> list[Figure]:
    return [
        median_of("refill of a freed slot", refills, "ms", _REFILL_MS),
        Figure("refill of a freed slot, 95th percentile", percentile(refills, 95), "ms"),
    ]


if __name__ == "__main__":
    run_bench("latency", __doc__, measure, engine="simulated")
