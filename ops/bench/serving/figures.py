"""The arithmetic of a measurement: what the times of many requests come to. docs/bench.md defines each figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from ops.bench.report import percentile_of
from ops.bench.serving.call import Outcome
from ops.bench.serving.plan import Criterion, Slo

PERCENTS: Final = (50, 90, 95, 99)
#: Of a request's gaps, the one that its ITL is judged by.
_ITL_PERCENT: Final = 95


@dataclass(frozen=True, slots=True)
class Spread:
    """How samples are spread; in their own unit. `percentiles` by percent."""

    count: int
    mean: float
    least: float
    most: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """None where there are no samples."""
        if not samples:
            return None
        ordered = sorted(samples)
        percentiles = {percent: percentile_of(ordered, percent) for percent in PERCENTS}
        return cls(len(ordered), fmean(ordered), ordered[0], ordered[-1], percentiles)


def ttft_s(outcome: Outcome) -> float:
    """From the submission to the first event with tokens."""
    return outcome.arrivals[0] - outcome.started


def e2e_s(outcome: Outcome) -> float:
    """From the submission to the last event."""
    return outcome.ended - outcome.started


def gaps_s(outcome: Outcome) -> list[float]:
    """Between each two events with tokens that follow each other."""
    at = outcome.arrivals
    return [later - earlier for earlier, later in pairwise(at)]


def tpot_s(outcome: Outcome) -> float | None:
    """From the first event with tokens to the last, by token but the first; None for one token, or one event."""
    if outcome.tokens < 2 or len(outcome.arrivals) < 2:
        return None
    return (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.tokens - 1)


def lateness_s(outcome: Outcome) -> float:
    """How much later than planned the request was sent."""
    return outcome.started - outcome.scheduled


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request succeeded and holds every bound.

    TTFT and end to end count from the time that the request was planned for, or a server that keeps its clients from
    asking would look better than it is. A request without gaps has nothing that could be above a bound on them.
    """
    if not outcome.succeeded:
        return False
    late = lateness_s(outcome)

    def value(criterion: Criterion) -> float:
        match criterion:
            case "ttft":
                return ttft_s(outcome) + late
            case "e2e":
                return e2e_s(outcome) + late
            case "tpot":
                return tpot_s(outcome) or 0.0
            case "itl":
                gaps = sorted(gaps_s(outcome))
                return percentile_of(gaps, _ITL_PERCENT) if gaps else 0.0

    return all(value(criterion) <= bound for criterion, bound in slo.bounds.items())


@dataclass(frozen=True, slots=True)
class Figures:
    """What a side came to. Times in seconds, rates by second of measured time.

    Attributes:
        latencies: by name: ttft, itl, tpot, e2e; queue, where the service tells it; in an open loop ttft_planned and
            e2e_planned, from the time that a request was planned for, and late, what lies between.
        good_requests_per_s, good_tokens_per_s: None where there is no SLO.
        unfinished: requests that were given up when the measurement was stopped; they are not in `requests`.
        errors: how many requests failed, by code; refusals are not in it.
        refusals: how many were refused with a Retry-After, by code.
        counted: requests whose tokens were counted by events, since the server did not tell.
        taken_up_again: jobs that more than one worker took up.
    """

    requests: int
    succeeded: int
    unfinished: int
    seconds: float
    latencies: Mapping[str, Spread]
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    good_requests_per_s: float | None
    good_tokens_per_s: float | None
    good_share: float | None
    tokens: int
    prompt_tokens: int
    tokens_per_event: float
    errors: Mapping[str, int]
    refusals: Mapping[str, int]
    resumes: int
    counted: int
    taken_up_again: int


def figures_of(outcomes: Sequence[Outcome], seconds: float, slo: Slo, *, is_open_loop: bool) -> Figures:
    """Latencies and tokens are those of requests that succeeded; rates are by `seconds`, of all of them."""
    every, outcomes = outcomes, [outcome for outcome in outcomes if not outcome.is_unfinished]
    done = [outcome for outcome in outcomes if outcome.succeeded]
    samples: dict[str, list[float]] = {
        "ttft": list(map(ttft_s, done)),
        "itl": [gap for outcome in done for gap in gaps_s(outcome)],
        "tpot": [value for outcome in done if (value := tpot_s(outcome)) is not None],
        "e2e": list(map(e2e_s, done)),
        "queue": [outcome.queue_s for outcome in done if outcome.queue_s is not None],
    }
    if is_open_loop:
        samples["ttft_planned"] = [ttft_s(outcome) + lateness_s(outcome) for outcome in done]
        samples["e2e_planned"] = [e2e_s(outcome) + lateness_s(outcome) for outcome in done]
        samples["late"] = list(map(lateness_s, outcomes))
    good = [outcome for outcome in done if is_good(outcome, slo)] if slo.bounds else None
    tokens = sum(outcome.tokens for outcome in done)
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in done)
    failed = [outcome for outcome in outcomes if not outcome.succeeded]

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Figures(
        requests=len(outcomes),
        succeeded=len(done),
        unfinished=len(every) - len(outcomes),
        seconds=seconds,
        latencies={name: spread for name, values in samples.items() if (spread := Spread.of(values)) is not None},
        requests_per_s=rate(len(done)),
        tokens_per_s=rate(tokens),
        prompt_tokens_per_s=rate(prompt_tokens),
        good_requests_per_s=None if good is None else rate(len(good)),
        good_tokens_per_s=None if good is None else rate(sum(outcome.tokens for outcome in good)),
        good_share=None if good is None or not outcomes else len(good) / len(outcomes),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        tokens_per_event=tokens / max(1, sum(len(outcome.arrivals) for outcome in done)),
        errors=dict(Counter(outcome.error for outcome in failed if not outcome.is_refused)),
        refusals=dict(Counter(outcome.error for outcome in failed if outcome.is_refused)),
        resumes=sum(outcome.resumes for outcome in outcomes),
        counted=sum(outcome.is_counted for outcome in done),
        taken_up_again=sum(outcome.attempts > 1 for outcome in done),
    )
