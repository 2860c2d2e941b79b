"""How long steps and tokens take in this worker, and how many sequences a step moves on: measured here, kept in Redis.

What was measured since the last report is lost with the process. All else that metrics count is counted in the ledger.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable

from tasks.ledger import SyncLedger
from tasks.metric_calls import MetricCalls
from tasks.metric_histograms import BATCH, BETWEEN_TOKENS, STEP, Histogram
from tasks.settings import Settings


class _Counts:
    """What one histogram has observed since it was taken last."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._counts = [0] * (len(histogram.bounds) + 1)
        self._sum = 0

    def add(self, value: int, times: int = 1) -> None:
        self._counts[bisect_left(self._histogram.bounds, value)] += times
        self._sum += value * times

    def fields(self) -> dict[str, int]:
        """What Redis is to add, by field."""
        bounds = (*self._histogram.bounds, None)
        found = {
            self._histogram.field(bound): count for bound, count in zip(bounds, self._counts, strict=True) if count
        }
        return {**found, self._histogram.sum_field(): self._sum} if found else {}


class StepTimes:
    """One thread notes steps, another one takes what was noted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._steps, self._between, self._batches = _Counts(STEP), _Counts(BETWEEN_TOKENS), _Counts(BATCH)

    def note(self, seconds: float, tokens: Iterable[tuple[float | None, int]]) -> None:
        """A turn of the step loop has taken so long.

        Args:
            tokens: of each sequence that got any, the seconds since its last ones, None where these are the first that
                this worker made of it; and how many.
        """
        with self._lock:
            self._steps.add(round(seconds * STEP.unit))
            num_sequences = 0
            for gap_s, count in tokens:
                num_sequences += 1
                if gap_s is not None:
                    self._between.add(round(gap_s * BETWEEN_TOKENS.unit / count), count)
            if num_sequences:
                self._batches.add(num_sequences)

    def take(self) -> dict[str, int]:
        """What was noted since the last time, as fields of what is counted of the pool."""
        with self._lock:
            taken = (self._steps, self._between, self._batches)
            self._begin()
        return {field: number for counts in taken for field, number in counts.fields().items()}


class StepReports:
    """Tells the ledger what was measured, with a heartbeat. A report that may not have come is sent again as it was."""

    def __init__(self, settings: Settings, times: StepTimes) -> None:
        self._calls = MetricCalls(settings)
        # heartbeats come whenever a slot changes hands
        self._interval_s = settings.heartbeat_s / 2
        self._times = times
        self._number = 0
        self._pending: dict[str, int] = {}
        self._told_at = time.monotonic()

    def tell(self, ledger: SyncLedger, incarnation: str, pool: str, *, is_last: bool = False) -> None:
        """Send what there is, if it is time. Raises RedisError where the ledger does not answer."""
        if not is_last and time.monotonic() - self._told_at < self._interval_s:
            return
        if not self._pending:
            self._pending = self._times.take()
            self._number += 1
        if self._pending:
            is_counted = ledger.run(self._calls.observe(incarnation, pool, self._number, self._pending))
            self._pending = {} if is_counted else self._pending
        self._told_at = time.monotonic()
