"""How much may wait: looked at and accepted in one script, counted exactly, never asked of what was accepted before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tasks import keys
from tasks.ledger_types import Job, QueueNumbers
from tasks.settings import Settings
from tests.ledger_batches import BATCH, feed, group_item, job_item, make_batch
from tests.ledger_counts import check_counts
from tests.ledger_harness import POOL, LedgerOnAClock, restore, snapshot, write

Make = Callable[..., LedgerOnAClock]
#: Owners are any short strings.
NAMES = ("all", "a", "a:b", "", " ", "jobs", "ключ", "1:x:m", "new\nline", "%s %d")


@pytest.fixture
def make(redis_client: redis.Redis) -> Make:
    return lambda **settings: LedgerOnAClock(redis_client, Settings(**settings))


def weighing(*prompt_tokens: int) -> list[Job]:
    return [Job(i, '{"prompt": "x"}', tokens) for i, tokens in enumerate(prompt_tokens)]


def accept_all(ledger: LedgerOnAClock, n: int, **more: Any) -> list[str]:
    """Submit so many jobs; returns the verdicts."""
    return [ledger.accept(f"{more.get('owner', 'all')}-{i}", **more).verdict for i in range(n)]


def numbers(ledger: LedgerOnAClock, id: str = "probe", **more: Any) -> QueueNumbers:
    """What is said of the queue to one who is refused."""
    queue = ledger.accept(id, **more).queue
    assert queue is not None
    return queue


def over_the_cap(ledger: LedgerOnAClock) -> None:
    assert accept_all(ledger, 5) == ["ok", "ok", "ok", "full_jobs", "full_jobs"]


def test_what_is_over_the_cap_is_refused_and_leaves_nothing(make: Make) -> None:
    ledger = make(max_queued_jobs=3)
    over_the_cap(ledger)
    before = ledger.dump()
    refused = ledger.accept("more")
    assert (refused.verdict, refused.queue) == ("full_jobs", QueueNumbers(3, 24, 3, 24, None, None, None))
    assert ledger.dump() == before
    check_counts(ledger.client, POOL)


def a_known_request_is_not_refused(ledger: LedgerOnAClock) -> None:
    ledger.accept("first", idempotency="i", body_hash="b")
    ledger.accept_group("g", n=2)
    assert ledger.accept("other").verdict == "full_jobs"
    assert ledger.accept("first").verdict == "again"
    assert ledger.accept_group("g", n=2).verdict == "again"
    assert (ledger.accept("new id", idempotency="i", body_hash="b").id) == "first"
    assert ledger.accept("new id", idempotency="i", body_hash="other").verdict == "conflict"


def test_what_was_accepted_before_is_not_refused_when_it_is_sent_again(make: Make) -> None:
    a_known_request_is_not_refused(make(max_queued_jobs=3))


def test_a_group_comes_in_whole_or_not_at_all(make: Make) -> None:
    ledger = make(max_queued_jobs=5)
    assert ledger.accept_group("g", n=3).verdict == "ok"
    assert ledger.accept_group("h", n=3).verdict == "full_jobs"
    assert ledger.client.exists(keys.group("h"), keys.record("h.0")) == 0
    assert ledger.accept_group("i", n=2).verdict == "ok"
    assert ledger.accept_group("j", n=6).verdict == "never_fits_jobs"


def each_way_out_makes_room(ledger: LedgerOnAClock) -> None:
    for id in ("stays", "claimed", "cancelled", "failed", "expired"):
        assert ledger.accept(id, deadline_s=5 if id == "expired" else 3600).verdict == "ok"
    assert ledger.accept("more").verdict == "full_jobs"
    ledger.claim("claimed")
    ledger.run(ledger.calls.cancel("cancelled"))
    ledger.run(ledger.calls.fail("failed", {"message": "no", "code": "engine_error"}))
    ledger.pass_grace()
    ledger.keep_ticking(6)
    assert ledger.status("expired") == "expired"
    check_counts(ledger.client, POOL)
    assert accept_all(ledger, 5) == ["ok"] * 4 + ["full_jobs"]


def test_whatever_leaves_the_queue_makes_room(make: Make) -> None:
    each_way_out_makes_room(make(max_queued_jobs=5))


def a_hand_back_counts(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    rider = ledger.claim("j")
    assert accept_all(ledger, 2) == ["ok", "ok"]
    assert ledger.run(ledger.calls.release(rider)) == "released"
    check_counts(ledger.client, POOL)
    assert numbers(ledger).jobs == 3
    ledger.claim("all-0")
    assert ledger.accept("more").verdict == "full_jobs", "two still wait"
    ledger.claim("all-1")
    assert ledger.accept("more").verdict == "ok"


def test_a_job_that_is_handed_back_counts_again_and_is_not_refused(make: Make) -> None:
    a_hand_back_counts(make(max_queued_jobs=2))


def a_lost_worker_counts(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("lost", tokens=2)
    ledger.accept("waits")
    ledger.let_lease_run_out(rider)
    assert ledger.accept("more").verdict == "full_jobs"
    ledger.keep_ticking(30)
    assert ledger.accept("more").verdict == "full_jobs", "for as long as nobody takes it up"
    taken = ledger.claim("lost")
    assert ledger.accept("more").verdict == "ok"
    ledger.finish(ledger.claim("more"))
    ledger.let_lease_run_out(taken)
    assert ledger.accept("another").verdict == "full_jobs"
    assert ledger.renew(taken).verdict == "ok", "its owner lives after all"
    assert ledger.accept("another").verdict == "ok"


def test_a_job_whose_worker_died_counts_until_another_takes_it_up(make: Make) -> None:
    a_lost_worker_counts(make(max_queued_jobs=2))


def test_tokens_are_those_of_the_prompt_and_max_tokens(make: Make) -> None:
    ledger = make(max_queued_tokens=100)
    assert ledger.accept("a", jobs=weighing(32), max_tokens=8).verdict == "ok"
    assert ledger.accept("g", jobs=weighing(2, 10), max_tokens=10, is_group=True).verdict == "ok"
    assert numbers(ledger, jobs=weighing(20), max_tokens=9).tokens == 72
    assert ledger.accept("b", jobs=weighing(20), max_tokens=9).verdict == "full_tokens"
    assert ledger.accept("b", jobs=weighing(20), max_tokens=8).verdict == "ok"
    assert ledger.accept("c", jobs=weighing(100), max_tokens=1).verdict == "never_fits_tokens"
    ledger.claim("a")
    assert ledger.accept("d", jobs=weighing(30), max_tokens=10).verdict == "ok"
    check_counts(ledger.client, POOL)


def test_a_job_that_is_to_make_nothing_weighs_nothing_and_leaves_the_queue(make: Make) -> None:
    ledger = make()
    assert ledger.accept("nothing", jobs=weighing(0), max_tokens=0).verdict == "ok"
    check_counts(ledger.client, POOL)
    assert ledger.claim("nothing").id == "nothing"
    check_counts(ledger.client, POOL)


def owners_have_caps_of_their_own(ledger: LedgerOnAClock) -> None:
    for name in NAMES:
        assert accept_all(ledger, 3, owner=name, most_jobs=2) == ["ok", "ok", "own_full_jobs"], name
    check_counts(ledger.client, POOL)
    for name in NAMES:
        ledger.claim(f"{name}-0")
        assert ledger.accept(f"{name}-new", owner=name, most_jobs=2).verdict == "ok"
        assert ledger.accept(f"{name}-more", owner=name, most_jobs=2).verdict == "own_full_jobs"
    check_counts(ledger.client, POOL)


def test_an_owner_has_caps_of_its_own_whatever_its_name(make: Make) -> None:
    owners_have_caps_of_their_own(make())


def test_an_owner_s_tokens_have_a_cap_too_and_its_own_limit_is_named_first(make: Make) -> None:
    ledger = make(max_queued_jobs=2)
    assert ledger.accept("a", owner="x", max_tokens=50, most_tokens=60).verdict == "ok"
    refused = ledger.accept("b", owner="x", max_tokens=50, most_tokens=60)
    assert (refused.verdict, refused.queue) == ("own_full_tokens", QueueNumbers(1, 50, 1, 50, None, None, None))
    ledger.accept("c", owner="y")
    assert ledger.accept("d", owner="x", most_jobs=1).verdict == "own_full_jobs"
    assert ledger.accept("d", owner="z", most_jobs=1).verdict == "full_jobs"


def all_pools_count_together(ledger: LedgerOnAClock) -> None:
    assert ledger.accept("a", pool="one").verdict == "ok"
    assert ledger.accept("b", pool="two", owner="x", most_jobs=1).verdict == "ok"
    assert ledger.accept("c", pool="three", owner="x", most_jobs=1).verdict == "own_full_jobs"
    assert ledger.accept("c", pool="three").verdict == "full_jobs"


def test_the_cap_is_one_for_all_pools(make: Make) -> None:
    all_pools_count_together(make(max_queued_jobs=2))


def lines_wait_outside_the_cap(ledger: LedgerOnAClock) -> None:
    make_batch(ledger, 20)
    accept_all(ledger, 2)
    assert feed(ledger, 0, [job_item(1), job_item(2), job_item(3)]) == "full"
    assert feed(ledger, 0, [job_item(1), job_item(2)]) == "ok"
    state = ledger.run(ledger.batch_calls.look_at_batch(BATCH))
    assert state is not None
    assert state.room == 0
    assert feed(ledger, 2, [job_item(3)]) == "full"
    # what batches have put there takes no place away from others
    assert [ledger.accept(f"more-{i}").verdict for i in range(3)] == ["ok", "ok", "full_jobs"]
    check_counts(ledger.client, POOL)


def test_lines_of_a_batch_keep_to_what_is_free_and_take_no_place_of_others(make: Make) -> None:
    lines_wait_outside_the_cap(make(max_queued_jobs=4))


def test_a_line_that_is_larger_than_the_queue_has_its_turn_when_nothing_waits(make: Make) -> None:
    ledger = make(max_queued_jobs=4)
    make_batch(ledger, 2)
    ledger.accept("j")
    assert feed(ledger, 0, [group_item(1, n=6)]) == "full"
    ledger.claim("j")
    assert feed(ledger, 0, [group_item(1, n=6)]) == "ok"


def test_a_plain_task_that_a_worker_has_taken_is_not_refused(make: Make) -> None:
    ledger = make(max_queued_jobs=1)
    assert ledger.accept("waits").verdict == "ok"
    assert ledger.accept("native", native=True).verdict == "ok"
    check_counts(ledger.client, POOL)


def test_a_cap_of_none_takes_everything(make: Make) -> None:
    assert set(accept_all(make(max_queued_jobs=0), 50)) == {"ok"}


# --- what a release does that does not count --------------------------------------------------------------------------


def as_the_release_before(ledger: LedgerOnAClock, id: str) -> None:
    """A job as it was accepted there: in the wait set, with a record that does not say what it weighs."""
    ledger.accept(id)
    for key in (keys.queued(POOL), keys.load(POOL), keys.own(POOL, "all"), keys.shares(POOL), keys.POOLS):
        ledger.client.delete(key)
    ledger.client.hdel(keys.record(id), "weight", "charged")


def test_what_the_release_before_left_in_the_queue_is_counted_and_invited(make: Make) -> None:
    ledger = make(max_queued_jobs=2)
    as_the_release_before(ledger, "old")
    assert ledger.accept("new", owner="x").verdict == "ok"
    ledger.advance(1.1)
    assert ledger.accept("more").verdict == "full_jobs"
    ledger.heartbeat()
    assert {one.id for one in ledger.pump()} == {"old", "new"}
    assert ledger.view("old")["queue_position"] == 1


def made_up_for(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 2)
    ledger.accept("x-0", owner="x")
    # a worker of the release before claims one, and an API of it accepts one
    ledger.client.zrem(keys.wait(POOL), "all-0")
    ledger.client.hset(keys.record("all-0"), "status", "running")
    assert ledger.accept("more").verdict == "ok"
    check_counts(ledger.client, POOL)
    ledger.advance(1.1)
    ledger.client.zadd(keys.wait(POOL), {"all-0": 5})
    ledger.client.hset(keys.record("all-0"), "status", "queued")
    assert ledger.accept("another").verdict == "full_jobs"
    check_counts(ledger.client, POOL)


def test_a_queue_that_was_changed_without_counting_is_counted_again(make: Make) -> None:
    made_up_for(make(max_queued_jobs=3))


def test_counts_are_right_after_a_lost_tail_because_they_are_lost_together(make: Make) -> None:
    ledger = make(max_queued_jobs=3)
    accept_all(ledger, 2)
    held = snapshot(ledger.client)
    ledger.claim("all-0")
    ledger.accept("x", owner="x")
    restore(ledger.client, held)
    check_counts(ledger.client, POOL)
    assert [ledger.accept(f"new-{i}").verdict for i in range(2)] == ["ok", "full_jobs"]


def test_nothing_is_left_of_the_counts_when_nothing_waits(make: Make) -> None:
    ledger = make()
    for name in NAMES:
        ledger.accept(f"j-{name}", owner=name)
    for name in NAMES:
        ledger.run(ledger.calls.cancel(f"j-{name}"))
    left = [key for key in map(str, ledger.client.scan_iter()) if ":own:" in key]
    assert left == []
    assert ledger.client.exists(keys.queued(POOL), keys.load(POOL), keys.shares(POOL)) == 0


# --- how long it takes ------------------------------------------------------------------------------------------------


def ride_for(ledger: LedgerOnAClock, id: str, seconds: float, tokens: int) -> None:
    """One job, that takes so long for so many tokens."""
    ledger.accept(id, max_tokens=tokens)
    rider = ledger.claim(id)
    ledger.advance(seconds)
    ledger.renew(rider)
    ledger.step(write(rider, 1, tokens))
    ledger.finish(rider)


def one_slot(ledger: LedgerOnAClock, slots: int = 1) -> None:
    """A worker whose slots are taken."""
    fields = {"state": "ready", "free": "0", "slots": str(slots), "fingerprint": "fp"}
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 10**8, fields))


def test_a_refusal_says_when_there_will_be_room_by_the_rate_that_was_measured(make: Make) -> None:
    ledger = make(max_queued_jobs=3)
    for i in range(3):
        ride_for(ledger, f"measured-{i}", 4, 8)
    accept_all(ledger, 3)
    assert numbers(ledger).room_ms is None, "no worker is ready"
    one_slot(ledger)
    queue = numbers(ledger)
    assert queue.room_ms == pytest.approx(4000, rel=0.02)
    assert queue.drain_ms == pytest.approx(12_000, rel=0.02)
    one_slot(ledger, slots=2)
    assert numbers(ledger).room_ms == pytest.approx(2000, rel=0.02)
    group = ledger.accept_group("g", n=3).queue
    assert group is not None
    assert group.room_ms == pytest.approx(6000, rel=0.02)


def measured(ledger: LedgerOnAClock, pool: str, ms_a_token: int, slots: int = 1) -> None:
    """A pool of which it is known how fast it is, and whose slots are taken."""
    ledger.client.hset(keys.rate(pool), mapping={"jobs": 1, "ms": ms_a_token, "square": 0, "tokens": 1})
    fields = {"state": "ready", "free": "0", "slots": str(slots), "fingerprint": "fp"}
    ledger.run(ledger.calls.heartbeat(f"w-{pool}", [pool], 10**8, fields))


def test_a_pause_is_that_of_the_pools_where_something_waits_whichever_is_asked_for(make: Make) -> None:
    ledger = make(max_queued_jobs=6)
    measured(ledger, "slow", 1000)
    measured(ledger, "fast", 100)
    for i in range(6):
        ledger.accept(f"slow-{i}", pool="slow", owner="x", max_tokens=10)
    queue = numbers(ledger, pool="fast")
    assert (queue.jobs, queue.room_ms, queue.drain_ms, queue.own_drain_ms) == (6, 10_000, 60_000, 0)
    queue = numbers(ledger, pool="fast", owner="x", most_jobs=4)
    assert (queue.own_jobs, queue.room_ms, queue.own_drain_ms) == (6, 30_000, 60_000)
    for i in range(2):
        assert ledger.run(ledger.calls.cancel(f"slow-{i}")) == "cancelled"
        ledger.accept(f"fast-{i}", pool="fast", max_tokens=10)
    # 1.1 jobs a second until the fast ones are gone, and a tenth of one from then on
    assert numbers(ledger, pool="slow").room_ms == pytest.approx(1000 / 1.1, abs=1)
    group = ledger.accept_group("g", n=4, pool="fast").queue
    assert group is not None
    assert group.room_ms == pytest.approx(20_000, abs=1)
    # what waits where nobody serves may be there for ever
    assert ledger.run(ledger.calls.cancel("fast-1")) == "cancelled"
    ledger.accept("unserved", pool="nobody's")
    queue = numbers(ledger, pool="fast")
    assert queue.room_ms == pytest.approx(1000 / 1.1, abs=1)
    assert queue.drain_ms is None
    whole = ledger.accept_group("g", n=6, pool="fast").queue
    assert whole is not None
    assert whole.room_ms is None


def test_a_job_that_would_be_late_is_refused_where_that_is_wanted(make: Make) -> None:
    ledger = make(refuse_late=True)
    for i in range(3):
        ride_for(ledger, f"measured-{i}", 4, 8)
    accept_all(ledger, 3)
    assert ledger.accept("nobody knows", deadline_s=1).verdict == "ok"
    one_slot(ledger)
    late = ledger.accept("late", deadline_s=15)
    assert late.verdict == "late"
    assert late.queue is not None
    assert late.queue.eta_ms == pytest.approx(4 * 4000 + 2000 + 4000, rel=0.02)
    assert late.queue.drain_ms == pytest.approx(4 * 4000, rel=0.02)
    assert late.queue.room_ms == pytest.approx(22_000 - 15_000, rel=0.05)
    assert ledger.accept("in time", deadline_s=30).verdict == "ok"
    assert ledger.accept("first", deadline_s=15, priority=0).verdict == "ok", "it goes before the others"
    assert ledger.accept("another's", owner="x", deadline_s=15).verdict == "ok", "its owner is next"
    assert ledger.accept("x-late", owner="x", deadline_s=9).verdict == "late"
    too_long = ledger.accept("too long", owner="x", deadline_s=9, max_tokens=80)
    assert too_long.verdict == "too_long", "not even if nothing else waited"
    assert too_long.queue is not None
    assert too_long.queue.eta_ms == pytest.approx(40_000, rel=0.02)
    assert ledger.accept("x-late", owner="x", deadline_s=19).verdict == "ok", "the fourth"
    assert ledger.client.exists(keys.record("late")) == 0
    assert make(refuse_late=False).accept("late", deadline_s=15).verdict == "ok"


def test_an_eta_is_that_of_the_work_ahead_and_its_own(make: Make) -> None:
    ledger = make()
    for i in range(20):
        ride_for(ledger, f"measured-{i}", 2, 10)
    one_slot(ledger, slots=2)
    ledger.ride("riding", tokens=3)
    ledger.accept("short", max_tokens=5)
    ledger.accept("long", max_tokens=50)
    ledger.accept("last", max_tokens=10)
    # 0.2 s a token; a slot comes free after half a ride on average, which two slots share
    etas = [ledger.view(id)["eta_s"] for id in ("short", "long", "last")]
    assert etas == pytest.approx([0.5 + 1, 0.5 + 0.5 + 10, 0.5 + 0.5 + 5 + 2], rel=0.05)
    assert ledger.view("riding")["eta_s"] == pytest.approx(0.2 * (8 - 3), rel=0.05)
    group = ledger.accept_group("g", n=2, max_tokens=10)
    assert ledger.view(group.id)["queue_position"] == 4
    assert ledger.view(group.id)["eta_s"] == pytest.approx(0.5 + 0.5 + 5 + 1 + 1 + 2, rel=0.05)


def test_between_owners_an_eta_is_that_of_the_very_jobs_that_go_before(make: Make) -> None:
    ledger = make()
    for i in range(20):
        ride_for(ledger, f"measured-{i}", 2, 10)
    one_slot(ledger)
    for i in range(10):
        ledger.accept(f"long-{i}", owner="long", max_tokens=50)
        ledger.accept(f"short-{i}", owner="short", max_tokens=5)
    # in turn, 10 s and 1 s, and the rest of a ride of 2 s before all of them
    for i in range(3):
        assert ledger.view(f"long-{i}")["eta_s"] == pytest.approx(1 + 11 * i + 10, rel=0.02)
        assert ledger.view(f"short-{i}")["eta_s"] == pytest.approx(1 + 11 * i + 11, rel=0.02)
    ledger.accept("new", owner="new", max_tokens=10)
    assert ledger.view("new")["eta_s"] == pytest.approx(1 + 10 + 1 + 2, rel=0.02)


def test_jobs_that_end_early_are_expected_to_do_so_again(make: Make) -> None:
    ledger = make()
    for i in range(60):
        id = f"measured-{i}"
        ledger.accept(id, max_tokens=100, tokens_are_default=i % 2 == 0)
        rider = ledger.claim(id)
        ledger.advance(1)
        ledger.step(write(rider, 1, 10 if i % 2 == 0 else 100))
        ledger.finish(rider)
    fields = {"state": "ready", "free": "2", "slots": "2", "fingerprint": "fp"}
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 10**8, fields))
    ledger.accept("default", max_tokens=100, tokens_are_default=True)
    ledger.accept("asked", max_tokens=100)
    default, asked = ledger.view("default")["eta_s"], ledger.view("asked")["eta_s"]
    assert math.isclose(asked / default, 10, rel_tol=0.1)


def test_no_eta_is_given_where_nothing_was_measured_or_no_worker_is_ready(make: Make) -> None:
    ledger = make()
    ledger.accept("j")
    one_slot(ledger)
    assert ledger.view("j")["eta_s"] is None
    ride_for(ledger, "measured", 1, 8)
    assert ledger.view("j")["eta_s"] is not None
    ledger.forget_worker()
    assert ledger.view("j")["eta_s"] is None
