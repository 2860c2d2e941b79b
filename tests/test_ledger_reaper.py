"""The ledger's scripts on a real server: invitations, the reaper, outages, models that change."""

from __future__ import annotations

from itertools import pairwise

import pytest
import redis

from tasks import keys
from tasks.ledger_types import Invitation
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, listening, well_formed, write


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def invited(ledger: LedgerOnAClock) -> list[str]:
    return [invitation.id for invitation in ledger.pump()]


def accept_all(ledger: LedgerOnAClock, n: int) -> None:
    for i in range(n):
        ledger.accept(f"j{i}")


# --- pump -------------------------------------------------------------------------------------------------------------


def test_nobody_is_invited_while_no_worker_of_the_pool_is_ready(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 1)
    assert invited(ledger) == []
    ledger.heartbeat(state="loading")
    ledger.heartbeat("elsewhere", pool="other")
    assert invited(ledger) == []
    ledger.heartbeat()
    assert ledger.pump() == [Invitation("j0", POOL)]


def test_as_many_are_invited_as_slots_are_free_and_two_more_in_order(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 10)
    ledger.heartbeat("w1", free=2)
    ledger.heartbeat("w2", free=1)
    assert invited(ledger) == [f"j{i}" for i in range(5)]
    assert invited(ledger) == [], "the marks are young"


def test_a_slot_that_comes_free_invites_the_next_one(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 5)
    ledger.heartbeat(free=1)
    assert invited(ledger) == ["j0", "j1", "j2"]
    assert ledger.run(ledger.calls.pump(POOL, "w1", 2)) == [Invitation("j3", POOL)]


def test_an_invitation_that_nobody_took_counts_as_lost_after_three_seconds(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 2)
    ledger.heartbeat(free=0)
    assert invited(ledger) == ["j0", "j1"]
    ledger.advance(2.9)
    assert invited(ledger) == []
    ledger.advance(0.2)
    assert invited(ledger) == ["j0", "j1"]


def test_messages_that_lie_in_the_broker_count_as_invitations(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 5)
    ledger.heartbeat(free=1)
    ledger.client.rpush(keys.queue(POOL), "message", "message")
    assert invited(ledger) == ["j0"]
    ledger.client.delete(keys.queue(POOL))
    assert invited(ledger) == ["j1", "j2"]


def test_a_job_that_is_claimed_or_ended_is_not_invited(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 3)
    ledger.heartbeat()
    ledger.claim("j0")
    ledger.run(ledger.calls.cancel("j1"))
    assert invited(ledger) == ["j2"]
    ledger.client.zadd(keys.wait(POOL), {"gone": 1})
    assert invited(ledger) == []
    assert ledger.client.zscore(keys.wait(POOL), "gone") is None


def test_a_job_is_passed_over_where_no_free_slot_serves_its_model(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("begun", tokens=1)))
    ledger.accept("new")
    ledger.heartbeat("w1", fingerprint="other")
    assert invited(ledger) == ["new"]
    ledger.heartbeat("w2")
    assert invited(ledger) == ["begun"]


def test_an_invitation_without_a_claim_may_be_made_again_at_once(ledger: LedgerOnAClock) -> None:
    accept_all(ledger, 1)
    ledger.heartbeat()
    assert invited(ledger) == ["j0"]
    assert ledger.run(ledger.calls.unclaimed("j0")) == POOL
    assert invited(ledger) == ["j0"]
    assert ledger.run(ledger.calls.unclaimed("nobody")) == ""


def test_a_heartbeat_asks_for_a_pump_when_it_turns_ready_or_has_more_free_slots(ledger: LedgerOnAClock) -> None:
    assert not ledger.heartbeat(state="loading")
    assert ledger.heartbeat(free=2)
    assert not ledger.heartbeat(free=2)
    assert ledger.heartbeat(free=3)
    assert not ledger.heartbeat(free=1)


# --- reap -------------------------------------------------------------------------------------------------------------


def test_a_queued_job_expires_at_its_deadline_with_no_worker_alive(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=60)
    ledger.keep_ticking(59)
    assert ledger.status("j") == "queued"
    ledger.keep_ticking(2)
    assert ledger.status("j") == "expired"
    assert ledger.view("j")["error"]["code"] == "deadline_exceeded"
    assert ledger.ends("j")[0].finish_reason == "expired"


def test_a_riding_job_is_told_of_its_deadline_and_may_end_itself(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=5)
    rider = ledger.claim("j")
    with listening(ledger.client, keys.owner_channel(0, "w1")) as next_message:
        ledger.keep_ticking(6)
        heard = next_message()
    assert heard == "j"
    assert (ledger.status("j"), ledger.field("j", "stop")) == ("running", "expired")
    assert ledger.due("j") == int(ledger.field("j", "lease"))
    ledger.finish(rider, "expired")
    assert ledger.status("j") == "expired"


def test_a_riding_job_whose_owner_is_silent_expires_when_its_lease_has_run_out(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=5)
    rider = ledger.claim("j")
    ledger.step(write(rider, 1))
    ledger.client.set(keys.TICK, ledger.now_ms)
    ledger.keep_ticking(10)
    assert ledger.status("j") == "expired"
    assert ledger.view("j")["text"] == "t1 "
    well_formed(ledger.log("j"))


def test_a_job_that_lost_its_owner_expires_with_no_worker_alive(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=30)
    ledger.let_lease_run_out(ledger.claim("j"))
    ledger.keep_ticking(40)
    assert ledger.status("j") == "expired"


def test_a_job_that_is_to_stop_ends_when_its_lease_has_run_out(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.run(ledger.calls.cancel("j"))
    ledger.let_lease_run_out(rider)
    assert ledger.status("j") == "cancelled"


def test_a_job_whose_lease_ran_out_is_invited_while_a_worker_is_ready(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    assert ledger.let_lease_run_out(rider) == []
    assert ledger.keep_ticking(10) == []
    ledger.heartbeat()
    assert ledger.keep_ticking(11)[0] == Invitation("j", POOL)
    assert ledger.status("j") == "running"
    assert ledger.client.zscore(keys.wait(POOL), "j") is None
    assert ledger.step(write(rider, 2)).verdict == "ok", "the old owner may still go on"


def test_invitations_of_one_job_thin_out_but_come_every_ten_seconds(ledger: LedgerOnAClock) -> None:
    ledger.heartbeat()
    rider = ledger.ride("j", tokens=1)
    invitations = ledger.let_lease_run_out(rider)
    assert len(invitations) == 1
    times = []
    for _ in range(60):
        if ledger.keep_ticking(0):
            times.append(ledger.now_ms)
        ledger.advance(1)
    gaps = [round((b - a) / 1000) for a, b in pairwise(times)]
    assert gaps[0] == 6
    assert set(gaps[1:]) <= {10, 11}


def test_a_job_that_is_taken_up_again_is_invited_soon_the_next_time(ledger: LedgerOnAClock) -> None:
    ledger.heartbeat()
    ledger.let_lease_run_out(ledger.ride("j", tokens=1))
    ledger.keep_ticking(60)
    ledger.let_lease_run_out(ledger.claim("j"))
    assert len(ledger.keep_ticking(4)) == 1


def test_after_an_outage_the_reaper_takes_nothing_for_one_grace_and_then_goes_on(ledger: LedgerOnAClock) -> None:
    ledger.heartbeat()
    silent, lively = ledger.ride("silent"), ledger.ride("lively")
    ledger.keep_ticking(1)
    ledger.advance(60)
    assert ledger.keep_ticking(4) == []
    assert ledger.renew(lively).verdict == "ok"
    assert ledger.keep_ticking(5) == [Invitation("silent", POOL)]
    assert ledger.field("silent", "owner") == silent.nonce


def test_the_reaper_looks_at_fifty_a_call_and_moves_each_beyond_now(ledger: LedgerOnAClock) -> None:
    for i in range(120):
        ledger.accept(f"j{i}", deadline_s=10)
    riders = [ledger.claim(f"j{i}") for i in range(60)]
    ledger.keep_ticking(0)
    ledger.advance(60)
    assert [ledger.reap().looked_at for _ in range(4)] == [50, 50, 20, 0]
    ledger.keep_ticking(9)
    assert {ledger.status(f"j{i}") for i in range(120)} == {"expired"}
    assert ledger.renew(riders[0]).stop == "expired"


def test_what_has_no_record_or_has_ended_is_dropped_from_due(ledger: LedgerOnAClock) -> None:
    ledger.client.zadd(keys.DUE, {"nobody": 1})
    ledger.finish(ledger.ride("j"))
    ledger.client.zadd(keys.DUE, {"j": 1})
    ledger.reap()
    assert ledger.client.zcard(keys.DUE) == 0


# --- another model ----------------------------------------------------------------------------------------------------


def seconds_until_end(ledger: LedgerOnAClock, id: str, most: int = 200) -> int | None:
    """Seconds, in steps of the reaper, until the job has ended."""
    for second in range(most):
        if ledger.status(id) not in ("queued", "running"):
            return second
        ledger.keep_ticking(1)
    return None


@pytest.mark.parametrize("handed_back", [True, False])
def test_a_job_whose_model_nobody_serves_any_more_ends_after_a_minute_with_its_text(
    ledger: LedgerOnAClock, handed_back: bool
) -> None:
    model_changes(ledger, handed_back)


def model_changes(ledger: LedgerOnAClock, handed_back: bool) -> None:
    rider = ledger.ride("j", tokens=2)
    ledger.heartbeat("w2", fingerprint="other")
    if handed_back:
        ledger.run(ledger.calls.release(rider))
    else:
        ledger.let_lease_run_out(rider)
    seconds = seconds_until_end(ledger, "j")
    assert seconds is not None
    assert 55 <= seconds <= 85
    assert ledger.view("j")["error"]["code"] == "model_changed"
    assert ledger.view("j")["text"] == "t1 t2 "
    well_formed(ledger.log("j"))


def test_a_job_without_tokens_may_change_its_model(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j")))
    ledger.heartbeat("w2", fingerprint="other")
    assert seconds_until_end(ledger, "j") is None
    assert ledger.try_claim("j", fingerprint="other")[0].verdict == "ok"


@pytest.mark.parametrize(
    "lives",
    [{"state": "loading", "fingerprint": ""}, {"state": "restarting"}, {"state": "ready", "free": 0}],
)
def test_a_job_waits_while_a_worker_of_its_model_lives_or_loads(ledger: LedgerOnAClock, lives: dict[str, str]) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j", tokens=2)))
    ledger.heartbeat("w2", fingerprint="other")
    ledger.heartbeat("w3", **lives)  # type: ignore[arg-type]
    assert seconds_until_end(ledger, "j") is None


def test_a_job_waits_where_no_worker_is_ready_at_all(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j", tokens=2)))
    ledger.heartbeat("w2", state="restarting", fingerprint="other")
    assert seconds_until_end(ledger, "j") is None


def test_the_minute_without_the_model_starts_anew_when_it_is_served_or_redis_was_away(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("queued", tokens=2)))
    ledger.let_lease_run_out(ledger.ride("running", tokens=2))
    ledger.heartbeat("w2", fingerprint="other")
    ledger.keep_ticking(45)
    ledger.heartbeat("w3")
    ledger.keep_ticking(15)
    ledger.forget_worker("w3")
    ledger.keep_ticking(45)
    ledger.advance(3600 / 4)  # an outage
    ledger.keep_ticking(45)
    assert [ledger.status(id) for id in ("queued", "running")] == ["queued", "running"]
    ledger.keep_ticking(45)
    assert [ledger.status(id) for id in ("queued", "running")] == ["failed", "failed"]


def test_a_worker_with_another_model_is_not_invited_to_go_on(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=2)
    ledger.heartbeat("w2", fingerprint="other")
    ledger.let_lease_run_out(rider)
    assert ledger.keep_ticking(20) == []
