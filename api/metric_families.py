"""The metrics that the ledger has, for Prometheus. docs/metrics.md says what each means; a test compares the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tasks import metric_histograms as kept
from tasks.codes import CODES
from tasks.metric_calls import PoolNumbers
from tasks.metric_histograms import ALL, CLASSES, Histogram, Observed, observed
from tasks.settings import Settings

#: So many models have series of their own; what is beyond is one more, `OTHER`.
MOST_MODELS: Final = 32
OTHER: Final = "other"
#: What always has a series, so that a first increase is seen as one.
_FINISHED: Final = ("stop", "length")
_FAILED: Final = ("cancelled", "deadline_exceeded", "worker_died", "claims_exhausted", "engine_error", "model_changed")
_RECOVERED: Final = ("worker_lost", "model_process_died", "handed_back")

_BY_PRIORITY: Final = (
    ("carpool_request_queue_time_seconds", "From acceptance until the job rides for the first time.", kept.QUEUE),
    ("carpool_time_to_first_token_seconds", "From acceptance until the first token is in the log.", kept.FIRST_TOKEN),
    ("carpool_e2e_request_latency_seconds", "From acceptance until the end, of jobs that succeeded.", kept.WHOLE),
)
_BY_MODEL: Final = (
    ("carpool_request_prompt_tokens", "Tokens of the prompts of jobs that succeeded.", kept.PROMPT_LENGTH),
    ("carpool_request_generation_tokens", "Tokens that jobs have made that succeeded.", kept.GENERATED_LENGTH),
    ("carpool_inter_token_latency_seconds", "Between two tokens of a sequence, in its worker.", kept.BETWEEN_TOKENS),
    ("carpool_step_seconds", "Turns of the model's step loop.", kept.STEP),
    ("carpool_step_batch_size", "Sequences that got a token in one turn.", kept.BATCH),
)


def ledger_families(pools: Sequence[PoolNumbers], settings: Settings) -> Iterator[Metric]:
    """What the ledger says of all models; `pools` come in the order of their names."""
    models = _bounded(pools)
    yield from _now(models)
    yield from _limits(settings)
    yield from _totals(models)
    for name, text, histogram in _BY_PRIORITY:
        family = HistogramMetricFamily(name, text, labels=["model", "priority"])
        for one in models:
            for of_class in CLASSES:
                found = observed(one.counted, histogram, of_class)
                if found or of_class == "normal":
                    _add(family, [one.pool, of_class], histogram, found)
        yield family
    for name, text, histogram in _BY_MODEL:
        family = HistogramMetricFamily(name, text, labels=["model"])
        for one in models:
            _add(family, [one.pool], histogram, observed(one.counted, histogram, ALL))
        yield family


def _now(models: Sequence[PoolNumbers]) -> Iterator[Metric]:
    gauges = (
        ("carpool_num_requests_running", "Jobs that ride under a lease that holds.", "running", 1),
        ("carpool_num_requests_waiting", "Jobs that do not ride, or whose worker was lost.", "waiting", 1),
        ("carpool_num_requests_invited", "Jobs that have been offered to workers.", "invited", 1),
        ("carpool_oldest_waiting_seconds", "How long a job has waited at most.", "oldest_ms", 1000),
        ("carpool_queue_eta_seconds", "What a job would wait that came now; none where unknown.", "eta_ms", 1000),
        ("carpool_queue_jobs", "Jobs that wait and that the cap on jobs counts.", "queued_jobs", 1),
        ("carpool_queue_tokens", "Tokens of jobs that wait and that the caps count.", "queued_tokens", 1),
        ("carpool_slots", "Slots of workers that are ready.", "slots", 1),
        ("carpool_slots_used", "Slots that are taken, by the workers' own word.", "used", 1),
    )
    for name, text, attribute, unit in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["model"])
        for one in models:
            value = getattr(one, attribute)
            if value is not None:
                gauge.add_metric([one.pool], value / unit)
        yield gauge
    workers = GaugeMetricFamily("carpool_workers", "Workers that live, by state.", labels=["model", "state"])
    for one in models:
        for state, number in sorted(one.states.items()):
            workers.add_metric([one.pool, state], number)
    yield workers


def _limits(settings: Settings) -> Iterator[Metric]:
    for name, text, most in (
        ("carpool_queue_jobs_limit", "CARPOOL_MAX_QUEUED_JOBS, where it is set.", settings.max_queued_jobs),
        ("carpool_queue_tokens_limit", "CARPOOL_MAX_QUEUED_TOKENS, where it is set.", settings.max_queued_tokens),
    ):
        gauge = GaugeMetricFamily(name, text, labels=[])
        if most:
            gauge.add_metric([], most)
        yield gauge


def _totals(models: Sequence[PoolNumbers]) -> Iterator[Metric]:
    prompt = CounterMetricFamily(
        "carpool_prompt_tokens", "Tokens of prompts of jobs that have ended.", labels=["model"]
    )
    cached = CounterMetricFamily(
        "carpool_prefix_cache_hits", "Tokens of those prompts that needed no prefill.", labels=["model"]
    )
    generated = CounterMetricFamily("carpool_generation_tokens", "Tokens in the logs of all jobs.", labels=["model"])
    success = CounterMetricFamily(
        "carpool_request_success", "Jobs that succeeded, by reason.", labels=["model", "finished_reason"]
    )
    failure = CounterMetricFamily("carpool_request_failure", "Jobs that did not, by code.", labels=["model", "code"])
    recoveries = CounterMetricFamily(
        "carpool_recoveries", "Rides that went on after an interruption, by cause.", labels=["model", "cause"]
    )
    for one in models:
        prompt.add_metric([one.pool], one.counted.get("prompt", 0))
        cached.add_metric([one.pool], one.counted.get("cached", 0))
        generated.add_metric([one.pool], one.generated)
        for family, known, may_be, found in (
            (success, _FINISHED, frozenset(_FINISHED), _under(one.counted, "ended:succeeded:")),
            (failure, _FAILED, frozenset(CODES), _failures(one.counted)),
            (recoveries, _RECOVERED, frozenset(_RECOVERED), _under(one.counted, "recovered:")),
        ):
            sums = Counter(dict.fromkeys(known, 0))
            for label, number in found:
                sums[label if label in may_be else OTHER] += number
            for label, number in sorted(sums.items()):
                family.add_metric([one.pool, label], number)
    yield from (prompt, cached, generated, success, failure, recoveries)


def _under(counted: Mapping[str, int], prefix: str) -> Iterator[tuple[str, int]]:
    return ((name[len(prefix) :], number) for name, number in counted.items() if name.startswith(prefix))


def _failures(counted: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for status in ("failed", "cancelled", "expired"):
        yield from _under(counted, f"ended:{status}:")


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram, found: Observed | None) -> None:
    counts = found.counts if found else [0] * (len(histogram.bounds) + 1)
    total, buckets = 0, []
    for bound, number in zip((*histogram.bounds, None), counts, strict=True):
        total += number
        buckets.append(("+Inf" if bound is None else str(bound / histogram.unit), total))
    family.add_metric(labels, buckets, sum_value=(found.sum if found else 0) / histogram.unit)


def _bounded(pools: Sequence[PoolNumbers]) -> list[PoolNumbers]:
    if len(pools) <= MOST_MODELS:
        return list(pools)
    named, rest = list(pools[:MOST_MODELS]), pools[MOST_MODELS:]
    return [*(one for one in named if one.pool != OTHER), _together([*(p for p in named if p.pool == OTHER), *rest])]


def _together(pools: Sequence[PoolNumbers]) -> PoolNumbers:
    """Several models as one: sums, but for times, of which it is the longest."""
    values: dict[str, object] = {"pool": OTHER}
    for field in fields(PoolNumbers):
        of_each = [getattr(one, field.name) for one in pools]
        if field.name in ("states", "counted"):
            values[field.name] = _summed(of_each)
        elif field.name in ("oldest_ms", "eta_ms"):
            values[field.name] = max((value for value in of_each if value is not None), default=None)
        elif field.name != "pool":
            values[field.name] = sum(of_each)
    return PoolNumbers(**values)  # type: ignore[arg-type]  # fields by their names


def _summed(of_each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in of_each:
        total.update(one)
    return dict(total)
