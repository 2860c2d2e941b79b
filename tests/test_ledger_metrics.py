"""What metrics say of jobs: each is counted once, whatever dies, and what rides is told by its lease."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.ledger_types import Job
from tasks.metric_calls import TALLY_PAGE, MetricCalls, PoolNumbers
from tasks.metric_histograms import BETWEEN_TOKENS, FIRST_TOKEN, PROMPT_LENGTH, QUEUE, WHOLE, Histogram, observed
from tasks.priority import HIGH, LOW
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, write

CALLS = MetricCalls(Settings())


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def now(ledger: LedgerOnAClock, pool: str = POOL) -> PoolNumbers:
    """How a pool is, with everything counted that has happened."""
    while ledger.run(CALLS.tally()) == TALLY_PAGE:
        pass
    return next(one for one in ledger.run(CALLS.gauges()) if one.pool == pool)


def times(found: PoolNumbers, histogram: Histogram, of_class: str = "normal") -> int:
    seen = observed(found.counted, histogram, of_class)
    return sum(seen.counts) if seen else 0


def counted_once(ledger: LedgerOnAClock) -> None:
    """A job that is taken up twice, and whose every call is sent again."""
    ledger.accept(jobs=[Job(7, "{}", 5)])
    ledger.advance(2)
    first = ledger.claim()
    ledger.advance(3)
    ledger.step(write(first, 1, 2, board=True, prompt_tokens=5, cached_tokens=3))
    ledger.step(write(first, 1, 2))
    ledger.let_lease_run_out(first)
    second = ledger.claim(worker="w2")
    ledger.step(write(second, 3, 1, prompt_tokens=5, cached_tokens=4))
    for _ in range(2):
        ledger.finish(second)
    found = now(ledger)
    assert found == now(ledger), "a second tally finds nothing"
    counted = {name: number for name, number in found.counted.items() if number and ":sum" not in name}
    assert counted == {
        "queue:normal:2500": 1,
        "first:normal:7500": 1,
        "whole:normal:15000": 1,
        "prompt_length:all:5": 1,
        "generated_length:all:5": 1,
        "recovered:worker_lost": 1,
        "ended:succeeded:stop": 1,
        "prompt": 5,
        "cached": 3,
    }
    assert (found.running, found.waiting, found.generated) == (0, 0, 3)


def test_a_job_counts_once_however_often_it_is_taken_up_and_sent_again(ledger: LedgerOnAClock) -> None:
    counted_once(ledger)


def running_by_lease(ledger: LedgerOnAClock) -> None:
    ledger.heartbeat(free=3)
    rider = ledger.ride("a", tokens=1)
    ledger.accept("b")
    found = now(ledger)
    assert (found.running, found.waiting) == (1, 1)
    ledger.client.set(keys.TICK, ledger.now_ms)
    ledger.client.delete(keys.GRACE)
    ledger.keep_ticking(7)
    assert now(ledger).running == 1, "its lease holds"
    ledger.advance(1.1)
    found = now(ledger)
    assert (found.running, found.waiting) == (0, 2), "before anybody has looked at it"
    ledger.keep_ticking(5)
    assert (now(ledger).running, now(ledger).waiting) == (0, 2)
    ledger.renew(rider)
    assert (now(ledger).running, now(ledger).waiting) == (1, 1), "it lived after all"


def test_a_dead_workers_jobs_do_not_ride_when_its_lease_has_run_out(ledger: LedgerOnAClock) -> None:
    running_by_lease(ledger)


def reported_once(ledger: LedgerOnAClock) -> None:
    field = BETWEEN_TOKENS.field_of(20_000)
    report = CALLS.observe("w1", POOL, 1, {field: 4, BETWEEN_TOKENS.sum_field(): 80_000})
    assert not ledger.run(report), "nobody has heard of this worker"
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 10_000, {"name": "w1", "state": "ready", "free": "1"}))
    for _ in range(2):
        assert ledger.run(report)
    assert ledger.run(CALLS.observe("w1", POOL, 2, {field: 1, BETWEEN_TOKENS.sum_field(): 1}))
    assert ledger.run(report), "late, and counted"
    found = observed({str(k): int(v) for k, v in ledger.client.hgetall(keys.counted(POOL)).items()}, BETWEEN_TOKENS)
    assert found is not None
    assert (sum(found.counts), found.sum) == (5, 80_001)
    assert int(str(ledger.client.ttl(keys.counted(POOL)))) > 0


def test_a_report_of_a_worker_that_is_sent_again_counts_once(ledger: LedgerOnAClock) -> None:
    reported_once(ledger)


def test_ends_are_told_apart_by_reason(ledger: LedgerOnAClock) -> None:
    ledger.finish(ledger.ride("a", tokens=2))
    ledger.finish(ledger.ride("b"), "failed", error='{"code": "engine_error", "message": "x"}')
    ledger.accept("c")
    ledger.run(ledger.calls.cancel("c"))
    ledger.accept("d", deadline_s=1)
    ledger.advance(2)
    ledger.reap()
    counted = now(ledger).counted
    assert {name: number for name, number in counted.items() if name.startswith("ended:")} == {
        "ended:succeeded:stop": 1,
        "ended:failed:engine_error": 1,
        "ended:cancelled:cancelled": 1,
        "ended:expired:deadline_exceeded": 1,
    }
    assert times(now(ledger), WHOLE) == 1, "the latency of jobs that succeeded"


def test_recoveries_are_told_apart_by_cause(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("a", tokens=1)
    ledger.run(ledger.calls.child_died("w1.1", "signal 9", [rider]))
    ledger.run(ledger.calls.child_died("w1.1", "signal 9", [rider]))
    ledger.run(ledger.calls.release(rider))
    ledger.claim("a")
    counted = now(ledger).counted
    assert (counted["recovered:model_process_died"], counted["recovered:handed_back"]) == (1, 1)
    assert "recovered:worker_lost" not in counted


def test_latencies_are_kept_apart_by_priority(ledger: LedgerOnAClock) -> None:
    for id, priority in (("a", HIGH), ("b", 5), ("c", LOW), ("d", 6)):
        ledger.accept(id, priority=priority)
        ledger.step(write(ledger.claim(id), 1, 1, board=True))
    found = now(ledger)
    for histogram in (QUEUE, FIRST_TOKEN):
        assert [times(found, histogram, one) for one in ("high", "normal", "low")] == [1, 1, 2]


def test_the_oldest_that_waits_is_found_behind_others_of_higher_priority(ledger: LedgerOnAClock) -> None:
    ledger.accept("old", priority=LOW)
    ledger.advance(60)
    for n in range(20):
        ledger.accept(f"n{n}", priority=HIGH)
    found = now(ledger)
    assert (found.waiting, found.queued_jobs) == (21, 21)
    assert 60_000 <= found.oldest_ms < 61_000


def test_the_wait_of_a_job_that_comes_now_is_told_by_the_rate(ledger: LedgerOnAClock) -> None:
    ledger.accept("a")
    assert now(ledger).eta_ms is None, "no worker"
    ledger.client.delete(keys.wait(POOL))
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 10_000, {"state": "ready", "free": "1", "slots": "1"}))
    rider = ledger.ride("b")
    ledger.advance(2)
    ledger.step(write(rider, 1, 8))
    ledger.finish(rider)
    assert now(ledger).eta_ms == 0, "a slot is free"
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 10_000, {"state": "ready", "free": "0", "slots": "1"}))
    ledger.accept("c", max_tokens=8)
    ledger.accept("d", max_tokens=8)
    eta = now(ledger).eta_ms
    assert eta is not None
    assert eta == pytest.approx(2 * 2000 + 1000, abs=100), "two before it, and half a ride of the one that has the slot"


def test_pools_are_apart_whatever_their_names_are(ledger: LedgerOnAClock) -> None:
    strange = "a b:c 1 2"
    ledger.accept("x", pool=strange)
    ledger.step(write(ledger.claim("x"), 1, 3, board=True))
    ledger.run(ledger.calls.cancel("x"))
    ledger.accept("y")
    found = now(ledger, strange)
    assert (found.generated, times(found, QUEUE), found.running) == (3, 1, 1)
    assert now(ledger).counted == {}


def test_more_events_than_a_page_are_all_counted(ledger: LedgerOnAClock) -> None:
    for n in range(TALLY_PAGE + 5):
        ledger.accept(f"j{n}")
        ledger.run(ledger.calls.cancel(f"j{n}"))
    assert ledger.run(CALLS.tally()) == TALLY_PAGE
    assert now(ledger).counted["ended:cancelled:cancelled"] == TALLY_PAGE + 5
    assert ledger.client.exists(keys.SEEN) == 0


def test_what_cannot_be_read_holds_up_nothing(ledger: LedgerOnAClock) -> None:
    ledger.ride("a")
    ledger.client.rpush(keys.SEEN, "x something new", "", "q", "q 5 m", "e succeeded", "f 5 many m")
    ledger.ride("b")
    assert times(now(ledger), QUEUE) == 2
    assert not ledger.client.exists(keys.SEEN)


def test_a_bucket_of_another_release_counts_as_the_next_one() -> None:
    found = observed({"prompt_length:all:3": 2, "prompt_length:all:10": 1, "prompt_length:all:sum": 16}, PROMPT_LENGTH)
    assert found is not None
    assert found.counts[PROMPT_LENGTH.bounds.index(5)] == 2
    assert sum(found.counts) == 3


def test_what_metrics_keep_does_not_stay_for_ever(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("a", tokens=1)
    assert int(str(ledger.client.pttl(keys.SEEN))) > 0
    assert int(str(ledger.client.pttl(keys.GENERATED))) > 0
    ledger.finish(rider)
    now(ledger)
    assert int(str(ledger.client.pttl(keys.counted(POOL)))) > 0


def test_where_very_much_is_due_at_once_the_workers_say_what_rides(ledger: LedgerOnAClock) -> None:
    ledger.ride("a", tokens=1)
    beat = {"name": "w1", "state": "ready", "free": "1", "slots": "4"}
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 60_000, beat))
    assert now(ledger).running == 1
    for n in range(2000):
        ledger.accept(f"j{n}", deadline_s=5)
    assert now(ledger).running == 3
