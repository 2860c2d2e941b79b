"""What an API key may ask for, counted by the ledger's scripts on a real server."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tasks import keys
from tasks.ledger_types import Accepted, Allowance, KeyLimits, Spent
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, write

KEY = "key_0123456789abcdef"


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def ask(ledger: LedgerOnAClock, id: str, limits: KeyLimits, tokens: int = 0, **more: Any) -> Accepted:
    """Ask for a job that counts as so many tokens."""
    counted = [tokens] if tokens else []
    return ledger.accept(id, owner=KEY, limits=limits, counted_tokens=counted, **more)


def live(ledger: LedgerOnAClock) -> set[str]:
    return {str(id) for id in ledger.client.zrange(keys.live(KEY), 0, -1)}


def test_no_minute_holds_more_requests_than_the_limit_wherever_it_begins(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=10)
    accepted: list[int] = []
    for i in range(600):
        ledger.advance(0.37)
        if ask(ledger, f"j{i}", limits).verdict == "ok":
            accepted.append(ledger.now_ms)
    assert len(accepted) > 30
    for first, eleventh in zip(accepted, accepted[10:], strict=False):
        assert eleventh - first > 60_000


def test_the_wait_that_is_told_is_enough_and_one_second_less_is_not(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=3)
    for i in range(3):
        assert ask(ledger, f"j{i}", limits).verdict == "ok"
        ledger.advance(5)
    refused = ask(ledger, "late", limits)
    assert refused.verdict == "limited"
    assert refused.over is not None
    assert (refused.over.what, refused.over.limit, refused.over.used, refused.over.asked) == ("requests", 3, 3, 1)
    assert 44_000 < refused.over.wait_ms <= 46_000
    ledger.advance(refused.over.wait_ms / 1000 - 1)
    assert ask(ledger, "late", limits).verdict == "limited"
    ledger.advance(1)
    assert ask(ledger, "late", limits).verdict == "ok"


def test_what_is_left_is_told_with_every_answer(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100)
    first = ask(ledger, "j0", limits, tokens=30).spent
    assert first is not None
    assert first.requests is not None
    assert (first.requests.limit, first.requests.remaining) == (5, 4)
    assert first.tokens is not None
    assert (first.tokens.limit, first.tokens.remaining) == (100, 70)
    assert 60_000 < first.tokens.reset_ms <= 61_000
    refused = ask(ledger, "j1", limits, tokens=71)
    assert refused.over is not None
    assert (refused.over.what, refused.over.asked) == ("tokens", 71)
    assert refused.spent is not None
    assert (refused.spent.requests, refused.spent.tokens) != (None, None)
    assert refused.spent.tokens is not None
    assert refused.spent.tokens.remaining == 70
    only_requests = ask(ledger, "j2", KeyLimits(requests_per_minute=9)).spent
    assert only_requests == Spent(Allowance(9, 7, first.requests.reset_ms - 2), None)


def test_a_refused_request_leaves_nothing_behind(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=100, jobs_at_once=1)
    ask(ledger, "j", limits, tokens=10)
    before = ledger.dump()
    for more in (KeyLimits(requests_per_minute=1), KeyLimits(tokens_per_minute=50), KeyLimits(jobs_at_once=1)):
        assert ask(ledger, "other", more, tokens=50).verdict == "limited"
    assert ledger.dump() == before


def test_what_is_sent_again_is_not_counted_again(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=1, jobs_at_once=1)
    again: dict[str, Any] = {"idempotency": "i", "body_hash": "b"}
    assert ask(ledger, "j", limits, **again).verdict == "ok"
    assert ask(ledger, "j", limits, **again).verdict == "again"
    answer = ask(ledger, "other", limits, **again)
    assert (answer.verdict, answer.id) == ("again", "j")


def test_more_than_the_limit_at_once_never_fits_and_says_so(ledger: LedgerOnAClock) -> None:
    over = ask(ledger, "j", KeyLimits(tokens_per_minute=10), tokens=11).over
    assert over is not None
    assert (over.what, over.wait_ms) == ("tokens", -1)
    answer = ledger.accept_group("g", 3, owner=KEY, limits=KeyLimits(jobs_at_once=2))
    assert answer.over is not None
    assert (answer.over.what, answer.over.asked, answer.over.wait_ms) == ("jobs", 3, -1)
    assert ledger.client.exists(keys.group("g")) == 0


def test_the_end_of_a_job_gives_back_the_tokens_that_it_did_not_use(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    ask(ledger, "j", limits, tokens=90)
    assert ask(ledger, "k", limits, tokens=20).verdict == "limited"
    rider = ledger.claim("j")
    ledger.step(write(rider, 1, 2, prompt_tokens=3))
    ledger.finish(rider)
    left = ask(ledger, "k", limits, tokens=95).spent
    assert left is not None
    assert left.tokens is not None
    assert left.tokens.remaining == 0


def test_one_that_used_more_than_it_was_counted_with_is_counted_right_in_the_end(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    ask(ledger, "j", limits, tokens=5)
    rider = ledger.claim("j")
    ledger.step(write(rider, 1, 2, prompt_tokens=60))
    ledger.finish(rider)
    assert ask(ledger, "k", limits, tokens=39).verdict == "limited"
    assert ask(ledger, "k", limits, tokens=38).verdict == "ok"


def test_a_late_end_gives_nothing_back_to_another_minute(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(tokens_per_minute=100)
    ask(ledger, "j", limits, tokens=90)
    ledger.advance(62)
    ask(ledger, "k", limits, tokens=50)
    ledger.run(ledger.calls.cancel("j"))
    left = ledger.run(ledger.calls.spend(KEY, limits))[0]
    assert left is not None
    assert left.tokens is not None
    assert left.tokens.remaining == 50


def test_a_late_end_leaves_no_key_behind(ledger: LedgerOnAClock) -> None:
    ask(ledger, "j", KeyLimits(tokens_per_minute=100), tokens=90)
    ledger.advance(62)
    ledger.client.delete(keys.minute(KEY))  # as its expiry does, on the server's clock
    ledger.run(ledger.calls.cancel("j"))
    assert not ledger.client.exists(keys.minute(KEY))


@pytest.mark.parametrize("end", ["finished", "cancelled", "expired", "poison"])
def test_jobs_at_once_are_those_that_have_not_ended_however_they_end(ledger: LedgerOnAClock, end: str) -> None:
    limits = KeyLimits(jobs_at_once=2)
    ask(ledger, "j", limits, deadline_s=100)
    ask(ledger, "k", limits)
    refused = ask(ledger, "l", limits)
    assert refused.over is not None
    assert (refused.over.what, refused.over.used, refused.over.wait_ms > 0) == ("jobs", 2, True)
    if end == "finished":
        ledger.finish(ledger.claim("j"))
    elif end == "cancelled":
        ledger.run(ledger.calls.cancel("j"))
    elif end == "expired":
        ledger.keep_ticking(101)
    else:
        for death in range(3):
            rider = ledger.claim("j")
            ledger.board(rider)
            ledger.run(ledger.calls.child_died(f"w1.{death}", "killed by SIGKILL", [rider]))
            if ledger.status("j") == "running":
                ledger.run(ledger.calls.release(rider))
    assert ledger.status("j") not in ("queued", "running")
    assert live(ledger) == {"k"}
    assert ask(ledger, "l", limits).verdict == "ok"


def test_of_jobs_at_once_the_wait_is_until_so_many_have_ended(ledger: LedgerOnAClock) -> None:
    def wait_ms(n: int) -> int:
        over = ledger.accept_group("more", n, owner=KEY, limits=limits).over
        assert over is not None
        return over.wait_ms

    limits = KeyLimits(jobs_at_once=3)
    for i, tokens in enumerate((30, 5, 4000)):
        ask(ledger, f"j{i}", limits, max_tokens=tokens)
    assert wait_ms(1) == 10_000, "nobody can tell"
    ledger.client.hset(keys.rate(POOL), mapping={"jobs": 1, "ms": 1000, "square": 0, "tokens": 1})
    ledger.heartbeat(free=4)
    assert [wait_ms(n) for n in (1, 2, 3)] == [5000, 30_000, 120_000]
    rider = ledger.claim("j0")
    ledger.step(write(rider, 1, 28))
    assert wait_ms(1) == 2000
    ledger.step(write(rider, 29, 2))
    assert wait_ms(1) == 1000
    assert wait_ms(4) == -1, "never"


def test_a_job_that_is_handed_back_or_whose_worker_died_still_counts(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(jobs_at_once=1)
    ask(ledger, "j", limits)
    rider = ledger.claim("j")
    ledger.run(ledger.calls.release(rider))
    assert ask(ledger, "k", limits).verdict == "limited"
    ledger.board(ledger.claim("j"))
    ledger.keep_ticking(60)
    assert ask(ledger, "k", limits).verdict == "limited"


def test_the_children_of_a_group_count_one_by_one(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(jobs_at_once=3)
    ledger.accept_group("g", 2, owner=KEY, limits=limits)
    assert live(ledger) == {"g.0", "g.1"}
    assert ledger.accept_group("h", 2, owner=KEY, limits=limits).verdict == "limited"
    ledger.finish(ledger.claim("g.0"))
    assert ledger.accept_group("h", 2, owner=KEY, limits=limits).verdict == "ok"


def test_another_key_s_limits_are_its_own(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=1, jobs_at_once=1)
    ask(ledger, "j", limits)
    assert ledger.accept("k", owner="key_other", limits=limits).verdict == "ok"
    assert ledger.accept("l").verdict == "ok"


def test_nothing_of_a_key_s_limits_is_without_an_expiry(ledger: LedgerOnAClock) -> None:
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100, jobs_at_once=5)
    ask(ledger, "j", limits, tokens=10)
    ledger.run(ledger.calls.spend(KEY, limits))
    for key in (keys.live(KEY), keys.minute(KEY), keys.jobs(KEY)):
        assert ledger.client.pttl(key) > 0, key
    assert int(str(ledger.client.pttl(keys.minute(KEY)))) <= 63_000


def test_what_another_key_has_made_is_not_there(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", owner=KEY)
    ledger.accept_group("g", owner=KEY)
    for owner in ("key_other", keys.NO_KEY):
        assert ledger.run(ledger.calls.view(["j", "g", "g.0"], owner)) == [None] * 3
        for id in ("j", "g", "g.0"):
            assert ledger.run(ledger.calls.cancel(id, owner)) == "gone"
            assert ledger.run(ledger.calls.forget(id, owner)) == "gone"
        assert ledger.run(ledger.calls.list(owner, "", 10))[0] == []
    assert ledger.status("j") == "queued"
    assert [view["id"] for view in ledger.run(ledger.calls.list(KEY, "", 10))[0]] == ["g", "j"]
    assert ledger.run(ledger.calls.cancel("j", KEY)) == "cancelled"
    assert ledger.run(ledger.calls.forget("j", KEY)) == "forgotten"


def test_a_record_of_a_release_without_keys_is_nobody_s(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.client.hdel(keys.record("j"), "key", "counted")
    assert ledger.run(ledger.calls.view(["j"], keys.NO_KEY)) != [None]
    assert ledger.run(ledger.calls.view(["j"], KEY)) == [None]
    ledger.finish(ledger.claim("j"))
    assert ledger.status("j") == "succeeded"
