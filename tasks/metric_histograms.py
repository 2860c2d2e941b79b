"""The histograms of /metrics that are kept in Redis: their bounds, and how they stand in the hash of a pool.

Bounds are vLLM's where it has the histogram, so that its dashboards read ours. They are whole numbers of what is
counted (milliseconds, say), since Redis adds whole numbers; `unit` says how many of those are one of the metric's unit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Class of a histogram that is not kept apart by priority.
ALL: Final = "all"
#: Priorities by the names that a request may give them; others are of the class in whose direction they are.
CLASSES: Final = ("high", "normal", "low")
_SUM: Final = "sum"
_BEYOND: Final = "inf"


@dataclass(frozen=True, slots=True)
class Histogram:
    """One histogram, as it is kept.

    Attributes:
        name: in Redis.
        unit: so many of what is counted are one of the metric's unit.
        bounds: upper, each included, rising, in what is counted.
    """

    name: str
    unit: int
    bounds: tuple[int, ...]

    def field(self, bound: int | None, of_class: str = ALL) -> str:
        """The field of the hash that counts up to this bound; None is beyond all."""
        return f"{self.name}:{of_class}:{_BEYOND if bound is None else bound}"

    def sum_field(self, of_class: str = ALL) -> str:
        """The field of the hash with the sum of all that was observed."""
        return f"{self.name}:{of_class}:{_SUM}"

    def field_of(self, value: int) -> str:
        """The field of the hash that counts this value."""
        index = bisect_left(self.bounds, value)
        return self.field(self.bounds[index] if index < len(self.bounds) else None)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a histogram has counted: how many in each bucket, the last one beyond all bounds, and the sum of it all."""

    counts: Sequence[int]
    sum: int


def _scaled(unit: int, bounds: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(bound * unit) for bound in bounds)


_REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LENGTHS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))[:17]

#: From acceptance until a job rides for the first time, by class.
QUEUE: Final = Histogram("queue", 1000, _scaled(1000, _REQUEST_S))
#: From acceptance until the first token is in the log, by class.
FIRST_TOKEN: Final = Histogram("first", 1000, _scaled(1000, _FIRST_TOKEN_S))
#: From acceptance until the end of a job that succeeded, by class.
WHOLE: Final = Histogram("whole", 1000, _scaled(1000, _REQUEST_S))
PROMPT_LENGTH: Final = Histogram("prompt_length", 1, _LENGTHS)
GENERATED_LENGTH: Final = Histogram("generated_length", 1, _LENGTHS)
#: What the scripts count (tasks/lua/tally.lua).
OF_JOBS: Final = (QUEUE, FIRST_TOKEN, WHOLE, PROMPT_LENGTH, GENERATED_LENGTH)

BETWEEN_TOKENS: Final = Histogram("between", 1_000_000, _scaled(1_000_000, _BETWEEN_TOKENS_S))
STEP: Final = Histogram("step", 1_000_000, _scaled(1_000_000, _STEP_S))
#: Sequences that a step moved on.
BATCH: Final = Histogram("batch", 1, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
#: What workers measure (worker/step_times.py).
OF_STEPS: Final = (BETWEEN_TOKENS, STEP, BATCH)


def observed(counted: Mapping[str, int], histogram: Histogram, of_class: str = ALL) -> Observed | None:
    """What the hash of a pool says of a histogram; None where nothing was observed.

    A bound of another release counts as the next one that this release has.
    """
    prefix = f"{histogram.name}:{of_class}:"
    counts = [0] * (len(histogram.bounds) + 1)
    total = 0
    for field, number in counted.items():
        if field.startswith(prefix):
            bound = field[len(prefix) :]
            if bound == _SUM:
                total = number
            elif bound == _BEYOND:
                counts[-1] += number
            else:
                counts[bisect_left(histogram.bounds, int(bound))] += number
    return Observed(counts, total) if any(counts) else None
