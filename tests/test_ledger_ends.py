"""The ledger's scripts on a real server: ends, deaths of the Model worker, hand-backs and cancels."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.ledger_types import Rider, Survivor
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, listening, well_formed, write


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def died(ledger: LedgerOnAClock, *riders: Rider, generation: str = "w1.1") -> list[Survivor]:
    return ledger.run(ledger.calls.child_died(generation, "exit code 137", riders))


def error_of(message: str) -> str:
    return f'{{"message":"{message}","type":"server_error","param":null,"code":"engine_error"}}'


# --- the end ----------------------------------------------------------------------------------------------------------


def test_an_end_is_one_entry_and_the_last_with_tail_usage_and_reason(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=2)
    answer = ledger.step(
        write(rider, 3, final="succeeded", finish_reason="length", tail="held", prompt_tokens=4),
    )
    assert (answer.verdict, answer.k, answer.stop) == ("ended", 3, "succeeded")
    well_formed(ledger.log("j"))
    assert [id for id, _ in ledger.raw_log("j")][-1] == "2-3"
    (end,) = ledger.ends("j")
    assert (end.status, end.finish_reason, end.text) == ("succeeded", "length", ("held",))
    assert end.usage == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert ledger.view("j")["text"] == "t1 t2 t3 held"
    assert ledger.celery_record("j")["status"] == "SUCCESS"


def test_an_ended_job_is_in_no_queue_and_not_due(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.heartbeat()
    ledger.pump()
    ledger.run(ledger.calls.cancel("j"))
    assert ledger.due("j") is None
    assert ledger.client.zcard(keys.wait(POOL)) == ledger.client.zcard(keys.invited(POOL)) == 0


def test_a_job_ends_once_whatever_comes_after(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    ledger.finish(rider)
    before = ledger.dump()
    ledger.finish(rider, "failed")
    ledger.run(ledger.calls.cancel("j"))
    ledger.run(ledger.calls.fail("j", {"message": "x"}))
    ledger.run(ledger.calls.release(rider))
    died(ledger, rider)
    ledger.advance(2 * 86400)
    ledger.pass_grace()
    ledger.keep_ticking(3)
    ledger.try_claim("j")
    assert ledger.dump() == before


def test_all_keys_of_an_ended_job_share_one_expiry(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", idempotency="i", body_hash="b", deadline_s=60)
    rider = ledger.claim("j")
    ledger.step(write(rider, 1))
    of_the_job = [keys.record("j"), keys.log("j"), keys.text("j"), "{carpool}:idem:i", "celery-task-meta-j"]
    while_it_runs = {ledger.client.pexpiretime(key) for key in of_the_job}
    assert len(while_it_runs) == 1, "deadline and retention"
    ledger.finish(rider)
    assert {ledger.client.pexpiretime(key) for key in of_the_job} == {ledger.now_ms + 86_400_000}


def test_an_error_that_is_no_json_changes_nothing(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    assert ledger.finish(rider, "failed", error="no json").verdict == "error"
    assert ledger.status("j") == "running"
    assert ledger.finish(rider, "failed", error=error_of("x")).verdict == "ended"
    well_formed(ledger.log("j"))


def test_a_queued_job_that_cannot_be_run_is_ended_and_a_running_one_is_not(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.ride("running")
    assert ledger.run(ledger.calls.fail("j", {"message": "no", "code": "eta_unsupported"})) == "ended"
    assert ledger.view("j")["error"]["code"] == "eta_unsupported"
    assert ledger.run(ledger.calls.fail("running", {"message": "no"})) == "no"


def test_an_ended_job_can_be_forgotten_and_a_live_one_not(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", idempotency="i", body_hash="b")
    assert ledger.run(ledger.calls.forget("j")) == "riding"
    ledger.finish(ledger.claim("j"))
    assert ledger.run(ledger.calls.forget("j")) == "forgotten"
    assert ledger.run(ledger.calls.forget("j")) == "gone"
    assert not [key for key in ledger.dump() if key not in (keys.POOLS, keys.use(POOL), keys.rate(POOL), keys.SEEN)]


# --- the Model worker died --------------------------------------------------------------------------------------------


def test_the_one_that_had_just_boarded_is_charged_and_the_others_become_suspects(ledger: LedgerOnAClock) -> None:
    old, young = ledger.ride("old", tokens=3), ledger.ride("young")
    assert died(ledger, old, young) == [Survivor("back", 1, 3), Survivor("back", 1, 0)]
    assert (ledger.field("old", "deaths"), ledger.field("young", "deaths")) == ("0", "1")
    assert ledger.field("old", "boarded") == ledger.field("young", "boarded") == ""


def test_a_suspect_near_the_place_where_it_struck_counts_as_young(ledger: LedgerOnAClock) -> None:
    old, suspect = ledger.ride("old", tokens=5), ledger.ride("suspect", tokens=3)
    died(ledger, suspect, generation="w1.1")
    ledger.board(suspect)
    ledger.step(write(suspect, 4, 2))  # two on: still within the run-ahead of its strike at 3
    died(ledger, old, suspect, generation="w1.2")
    assert (ledger.field("old", "deaths"), ledger.field("suspect", "deaths")) == ("0", "2")


def test_a_suspect_that_has_come_further_is_no_longer_one(ledger: LedgerOnAClock) -> None:
    old, suspect = ledger.ride("old", tokens=5), ledger.ride("suspect", tokens=3)
    died(ledger, suspect, generation="w1.1")
    ledger.board(suspect)
    ledger.step(write(suspect, 4, 3))
    died(ledger, old, suspect, generation="w1.2")
    assert (ledger.field("old", "deaths"), ledger.field("suspect", "deaths")) == ("1", "2"), "all that were boarded"
    assert ledger.field("suspect", "strikes") == "1", "another position"


def test_where_none_is_young_all_that_were_boarded_are_charged(ledger: LedgerOnAClock) -> None:
    riders = [ledger.ride("a", tokens=2), ledger.ride("b", tokens=4)]
    died(ledger, *riders)
    assert [ledger.field(id, "deaths") for id in ("a", "b")] == ["1", "1"]


def test_riders_that_were_not_in_the_child_are_never_charged(ledger: LedgerOnAClock) -> None:
    boarded = ledger.ride("boarded", tokens=1)
    ledger.accept("claimed")
    claimed = ledger.claim("claimed")
    assert died(ledger, boarded, claimed) == [Survivor("back", 1, 1), Survivor("back", 0, -1)]
    assert ledger.field("claimed", "deaths") == "0"
    assert ledger.field("claimed", "strikes") == "0"


def test_the_same_death_told_again_changes_nothing(ledger: LedgerOnAClock) -> None:
    old, young = ledger.ride("old", tokens=3), ledger.ride("young")
    first = died(ledger, old, young)
    before = ledger.dump()
    assert died(ledger, old, young) == first
    assert ledger.dump() == before


def test_a_death_told_again_after_a_rider_boarded_anew_does_not_touch_it(ledger: LedgerOnAClock) -> None:
    old, young = ledger.ride("old", tokens=3), ledger.ride("young")
    died(ledger, old, young)
    ledger.board(young)
    died(ledger, old, young)
    assert ledger.field("young", "deaths") == "1"
    assert ledger.field("young", "boarded") == "0"


def test_a_death_that_is_told_after_a_later_one_does_not_count_again(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    died(ledger, rider, generation="w1.9")
    ledger.board(rider)
    died(ledger, rider, generation="w1.10")
    ledger.board(rider)
    died(ledger, rider, generation="w1.9")  # sent again long ago, and only now executed
    assert (ledger.field("j", "deaths"), ledger.field("j", "boarded")) == ("2", "0")


def test_a_death_is_charged_to_the_owner_s_own_riders_only(ledger: LedgerOnAClock) -> None:
    lost, kept = ledger.ride("lost"), ledger.ride("kept", tokens=1)
    ledger.let_lease_run_out(lost)
    other = ledger.claim("lost", worker="w2")
    ledger.board(other)
    deaths = ledger.field("lost", "deaths")
    assert [fate.verdict for fate in died(ledger, lost, kept)] == ["fenced", "back"]
    assert ledger.field("lost", "deaths") == deaths
    assert ledger.field("lost", "boarded") == "0"


def test_the_third_death_at_one_place_ends_the_poison_job_alone(ledger: LedgerOnAClock) -> None:
    poison, beside = ledger.ride("poison", tokens=1), ledger.ride("beside", tokens=9)
    fates = []
    for generation in range(1, 4):
        ledger.board(poison)
        fates = died(ledger, poison, beside, generation=f"w1.{generation}")
    assert [fate.verdict for fate in fates] == ["ended", "back"]
    error = ledger.view("poison")["error"]
    assert error["code"] == "worker_died"
    assert "3 times at the same token" in error["message"]
    assert error["message"].count("at token 2: exit code 137") == 3
    assert ledger.status("beside") == "running"
    well_formed(ledger.log("poison"))


# --- hand-back --------------------------------------------------------------------------------------------------------


def test_a_job_that_is_handed_back_keeps_its_place_and_is_not_charged(ledger: LedgerOnAClock) -> None:
    for id in ("first", "second", "third"):
        ledger.accept(id)
    ledger.claim("first")
    rider = ledger.claim("second")
    ledger.board(rider)
    ledger.step(write(rider, 1))
    assert ledger.run(ledger.calls.release(rider)) == "released"
    assert ledger.client.zrange(keys.wait(POOL), 0, -1) == ["second", "third"]
    record = ledger.record("second")
    assert [record[name] for name in ("status", "owner", "lease", "boarded", "deaths", "strikes", "k")] == [
        "queued", "", "0", "", "0", "0", "1",
    ]  # fmt: skip
    assert ledger.run(ledger.calls.release(rider)) == "fenced"


def test_a_job_that_is_handed_back_without_a_token_is_due_at_its_deadline(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j")))
    assert ledger.due("j") == int(ledger.field("j", "deadline"))


def test_a_hand_back_of_a_job_that_is_to_stop_ends_it(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    ledger.run(ledger.calls.cancel("j"))
    assert ledger.run(ledger.calls.release(rider)) == "cancelled"
    assert ledger.status("j") == "cancelled"
    assert ledger.view("j")["text"] == "t1 "


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_a_queued_job_is_cancelled_at_once_with_no_worker_there(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    assert ledger.run(ledger.calls.cancel("j")) == "cancelled"
    assert ledger.ends("j")[0].finish_reason == "cancelled"
    assert ledger.run(ledger.calls.cancel("j")) == "cancelled"
    assert ledger.run(ledger.calls.cancel("nobody")) == "gone"
    assert ledger.client.exists(keys.record("nobody")) == 0


def test_a_riding_job_is_asked_to_stop_and_its_owner_hears_of_it(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    with listening(ledger.client, keys.owner_channel(0, "w1")) as next_message:
        assert ledger.run(ledger.calls.cancel("j")) == "requested"
        heard = next_message()
    assert heard == "j"
    assert ledger.status("j") == "running"
    assert ledger.view("j")["cancel_requested"] is True
    assert ledger.renew(rider).stop == ledger.step(write(rider, 2)).stop == "cancelled"
    assert ledger.due("j") == int(ledger.field("j", "lease"))
    ledger.finish(rider, "cancelled")
    assert ledger.status("j") == "cancelled"


def test_the_first_stop_wins(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=5)
    rider = ledger.claim("j")
    ledger.advance(6)
    ledger.renew(rider)
    assert ledger.run(ledger.calls.cancel("j")) == "requested"
    assert ledger.renew(rider).stop == "expired"


def test_an_end_of_its_own_that_comes_before_the_stop_wins(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    ledger.run(ledger.calls.cancel("j"))
    ledger.finish(rider)
    assert ledger.status("j") == "succeeded"


def test_a_cancel_of_a_job_whose_owner_is_silent_waits_for_the_end_of_grace(ledger: LedgerOnAClock) -> None:
    ledger.ride("j", tokens=1)
    ledger.advance(60)
    assert ledger.run(ledger.calls.cancel("j")) == "requested", "the owner may only be cut off"
    ledger.keep_ticking(ledger.settings.grace_s + 1)
    assert ledger.status("j") == "cancelled"


def test_a_cancel_after_the_lease_has_run_out_ends_the_job_at_once(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    ledger.let_lease_run_out(rider)
    assert ledger.run(ledger.calls.cancel("j")) == "cancelled"
    assert ledger.step(write(rider, 2)).stop == "cancelled"
