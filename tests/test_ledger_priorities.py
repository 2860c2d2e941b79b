"""The queue's order: arrival, moved by priority, within a bound."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.priority import HIGH, LOW, NORMAL, STEP_S, priority_number
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def waiting(ledger: LedgerOnAClock) -> list[str]:
    return [str(id) for id in ledger.client.zrange(keys.wait(POOL), 0, -1)]


def test_a_higher_priority_goes_before_what_came_earlier(ledger: LedgerOnAClock) -> None:
    for priority in (LOW, NORMAL, HIGH, 0):
        ledger.accept(f"p{priority}", priority=priority)
    ledger.accept_group("g", n=2, priority=HIGH)
    assert waiting(ledger) == ["p0", "p1", "g.0", "g.1", "p5", "p9"]
    assert [ledger.view(id)["priority"] for id in ("p0", "g", "g.1", "p5")] == [0, HIGH, HIGH, NORMAL]


def test_a_low_job_is_overtaken_only_by_normal_ones_that_come_within_ten_minutes(ledger: LedgerOnAClock) -> None:
    ledger.accept("low", priority=LOW)
    bound_s = (LOW - NORMAL) * STEP_S
    assert bound_s == 600
    ledger.advance(bound_s - 1)
    ledger.accept("within")
    ledger.advance(2)
    ledger.accept("after")
    assert waiting(ledger) == ["within", "low", "after"]


def test_a_job_that_is_handed_back_keeps_the_place_that_its_priority_gave_it(ledger: LedgerOnAClock) -> None:
    ledger.accept("low", priority=LOW)
    ledger.accept("normal")
    ledger.accept("high", priority=HIGH)
    for id in ("low", "normal", "high"):
        ledger.run(ledger.calls.release(ledger.claim(id)))
    assert waiting(ledger) == ["high", "normal", "low"]


def test_a_priority_has_one_meaning_as_a_name_and_as_a_number() -> None:
    assert [priority_number(name) for name in ("high", "normal", "low")] == [1, 5, 9]
    assert (priority_number(3), priority_number(None), priority_number(None, LOW)) == (3, NORMAL, LOW)
