"""The ledger's scripts on a real server: how long keys live, and what is said of jobs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import redis

from tasks import keys
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, write


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def invited(ledger: LedgerOnAClock) -> list[str]:
    return [invitation.id for invitation in ledger.pump()]


def accept_all(ledger: LedgerOnAClock, n: int) -> None:
    for i in range(n):
        ledger.accept(f"j{i}")


def keys_without_expiry(client: redis.Redis) -> set[str]:
    return {str(key) for key in client.scan_iter() if int(str(client.pttl(key))) < 0}


def test_no_key_of_a_job_is_without_an_expiry_at_any_point_of_its_life(ledger: LedgerOnAClock) -> None:
    def check() -> None:
        assert keys_without_expiry(ledger.client) == set()

    ledger.accept("j", idempotency="i", body_hash="b", native=True)
    ledger.accept_group("g", n=2, idempotency="k", body_hash="b")
    check()
    ledger.heartbeat()
    ledger.pump()
    check()
    rider = ledger.claim("j")
    ledger.board(rider)
    ledger.step(write(rider, 1))
    ledger.run(ledger.calls.attach(30_000, [("j", "a"), ("nobody", "a")]))
    check()
    ledger.run(ledger.calls.child_died("w1.1", "x", [rider]))
    ledger.run(ledger.calls.release(rider))
    check()
    rider = ledger.claim("j")
    ledger.let_lease_run_out(rider)
    check()
    ledger.finish(rider)
    for child in ("g.0", "g.1"):
        ledger.run(ledger.calls.cancel(child))
    check()


def test_a_queued_job_that_is_ended_leaves_no_key_without_an_expiry(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.client.delete(keys.wait(POOL), keys.DUE, "{carpool}:jobs:all")
    ledger.run(ledger.calls.cancel("j"))
    assert keys_without_expiry(ledger.client) == set()


def test_shared_keys_live_as_long_as_the_longest_job(ledger: LedgerOnAClock) -> None:
    ledger.accept("long", deadline_s=5000)
    shared = (keys.DUE, keys.wait(POOL), "{carpool}:jobs:all")
    longest = [ledger.client.pexpiretime(key) for key in shared]
    ledger.accept("short", deadline_s=50)
    assert [ledger.client.pexpiretime(key) for key in shared] == longest


def test_after_the_retention_of_the_last_job_nothing_is_left(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings(retention_s=0.4, idempotency_s=0.2), real_time=True)
    for i in range(50):
        # What is claimed below must not be over by then, however slow the machine is.
        deadline_s = 5 if i < 30 else 0.2
        ledger.accept(f"j{i}", deadline_s=deadline_s, idempotency=f"i{i}" if i % 2 else "", body_hash="b")
    ledger.accept_group("g", n=3, deadline_s=0.2)
    for i in range(30):
        ledger.finish(ledger.claim(f"j{i}"))
    until = time.monotonic() + 15
    while time.monotonic() < until:
        redis_client.delete(keys.TICK)
        if list(redis_client.scan_iter()) == [keys.SEEN]:
            break
        time.sleep(0.05)  # the server's own clock is what this test is about
    # but for what metrics have still to count, which no process did here
    assert list(redis_client.scan_iter()) == [keys.SEEN]
    assert 0 < redis_client.pttl(keys.SEEN) <= 24 * 3600 * 1000


def test_who_waits_for_a_job_is_counted_until_they_leave_or_fall_silent(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.run(ledger.calls.attach(30_000, [("j", "a"), ("j", "b"), ("j", "c")]))
    assert ledger.run(ledger.calls.detach("j", "a")) == 2
    ledger.advance(20)
    ledger.run(ledger.calls.attach(30_000, [("j", "b")]))
    ledger.advance(20)
    assert ledger.run(ledger.calls.detach("j")) == 1


def test_a_look_says_how_jobs_and_groups_stand(ledger: LedgerOnAClock) -> None:
    ledger.accept("first")
    ledger.accept("second")
    ledger.accept_group("g")
    rider = ledger.ride("riding", tokens=2)
    ids = ["first", "second", "g", "riding", "nobody"]
    first, second, group, riding, nobody = ledger.run(ledger.calls.look(ids, outlook=True))
    assert first is not None and second is not None and group is not None and riding is not None  # noqa: PT018
    assert (first.position, second.position, first.has_worker) == (1, 2, False)
    assert (riding.k, riding.lease_ms) == (2, 8000 - 1)
    assert (group.status, nobody) == ("queued", None)
    assert ledger.run(ledger.calls.look(["second"])) == [replace(second, position=0)]
    ledger.finish(rider)
    (ended,) = ledger.run(ledger.calls.look(["riding"]))
    assert ended is not None
    assert ended.ended
