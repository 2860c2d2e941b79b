"""What a worker measures of its steps, and that each measurement counts once."""

from __future__ import annotations

from typing import TypeVar

import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tasks import keys
from tasks.calls import Call
from tasks.metric_histograms import BATCH, BETWEEN_TOKENS, STEP, Histogram, Observed, observed
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock
from worker.step_times import StepReports, StepTimes

T = TypeVar("T")


def found(fields: dict[str, int], histogram: Histogram) -> Observed:
    seen = observed(fields, histogram)
    assert seen is not None
    return seen


def test_a_step_counts_its_time_its_sequences_and_the_gaps_between_their_tokens() -> None:
    times = StepTimes()
    times.note(0.004, [(None, 1), (0.03, 1), (0.09, 3)])
    times.note(0.2, [])
    fields = times.take()
    steps = found(fields, STEP)
    assert (steps.counts[STEP.bounds.index(5_000)], steps.counts[STEP.bounds.index(250_000)]) == (1, 1)
    assert steps.sum == 204_000
    batches = found(fields, BATCH)
    assert (batches.counts[BATCH.bounds.index(4)], sum(batches.counts), batches.sum) == (1, 1, 3), "a prefill has none"
    between = found(fields, BETWEEN_TOKENS)
    assert between.counts[BETWEEN_TOKENS.bounds.index(50_000)] == 4, "three tokens that came together were 30 ms apart"
    assert (sum(between.counts), between.sum) == (4, 120_000)
    assert times.take() == {}


def test_what_is_beyond_all_bounds_counts_there() -> None:
    times = StepTimes()
    times.note(1000, [(1000, 1)])
    fields = times.take()
    assert found(fields, STEP).counts[-1] == 1
    assert found(fields, BETWEEN_TOKENS).counts[-1] == 1


class Unreliable(LedgerOnAClock):
    """Runs a call and loses its answer, so often."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client, Settings())
        self.answers_to_lose = 0

    def run(self, call: Call[T]) -> T:
        answer = super().run(call)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise RedisConnectionError("the answer was lost")
        return answer


def test_a_report_whose_answer_was_lost_is_sent_again_and_counts_once(redis_client: redis.Redis) -> None:
    ledger, times = Unreliable(redis_client), StepTimes()
    reports = StepReports(Settings(), times)
    ledger.run(ledger.calls.heartbeat("w", [POOL], 60_000, {"name": "w", "state": "ready", "free": "1"}))
    times.note(0.004, [(None, 1)])
    reports.tell(ledger, "w", POOL)
    assert not redis_client.exists(keys.counted(POOL)), "it is not yet time"
    ledger.answers_to_lose = 1
    for _ in range(3):
        try:
            reports.tell(ledger, "w", POOL, is_last=True)
        except RedisConnectionError:
            times.note(0.004, [(None, 1)])
    counted = {str(name): int(value) for name, value in redis_client.hgetall(keys.counted(POOL)).items()}
    assert sum(found(counted, STEP).counts) == 2


def test_a_report_waits_for_the_heartbeat_that_it_belongs_to(redis_client: redis.Redis) -> None:
    ledger, times = Unreliable(redis_client), StepTimes()
    reports = StepReports(Settings(), times)
    times.note(0.004, [(None, 1)])
    reports.tell(ledger, "w", POOL, is_last=True)
    assert not redis_client.exists(keys.counted(POOL))
    ledger.run(ledger.calls.heartbeat("w", [POOL], 60_000, {"name": "w", "state": "ready", "free": "1"}))
    reports.tell(ledger, "w", POOL, is_last=True)
    assert redis_client.hget(keys.counted(POOL), STEP.field(5_000)) == "1"
