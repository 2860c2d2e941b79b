"""The ledger's scripts on a real server: steps, renewals and their fences."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.ledger_types import SlotWrite
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, listening, token, well_formed, word, write


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def test_steps_write_each_token_once_and_in_order(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    assert ledger.step(write(rider, 1)).k == 1
    assert ledger.step(write(rider, 2, 3)).k == 4
    assert [id for id, _ in ledger.raw_log("j")] == ["1-0", "1-1", "1-4"]
    entries = ledger.log("j")
    well_formed(entries)
    assert [n for entry in entries for n in entry.ids] == [token(n) for n in range(1, 5)]
    assert ledger.client.get(keys.text("j")) == "".join(map(word, range(1, 5)))


def test_the_same_step_again_says_where_the_ledger_is_and_writes_nothing(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.step(write(rider, 1))
    answer = ledger.step(write(rider, 1))
    assert (answer.verdict, answer.k) == ("at", 1)
    assert ledger.client.get(keys.text("j")) == word(1)
    well_formed(ledger.log("j"))


def test_a_step_that_leaves_a_gap_is_not_written(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    answer = ledger.step(write(rider, 3))
    assert (answer.verdict, answer.k) == ("at", 1)
    assert len(ledger.log("j")) == 2


def test_an_end_with_tokens_that_do_not_fit_is_not_written(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    assert ledger.step(write(rider, 3, final="succeeded")).verdict == "at"
    assert ledger.status("j") == "running"


def test_an_entry_is_published_as_it_stands_in_the_log(ledger: LedgerOnAClock) -> None:
    with listening(ledger.client, keys.channel(0, "j")) as next_message:
        rider = ledger.ride("j", tokens=2)
        ledger.step(write(rider, 3, final="succeeded", finish_reason="length"))
        heard = [next_message() for _ in ledger.raw_log("j")]
    assert heard == [fields["d"] for _, fields in ledger.raw_log("j")]


def test_the_old_owner_writes_nothing_after_another_has_claimed(ledger: LedgerOnAClock) -> None:
    old = ledger.ride("j", tokens=1)
    ledger.let_lease_run_out(old)
    new = ledger.claim("j")
    before = ledger.dump()
    assert ledger.step(write(old, 2)).verdict == "fenced"
    assert ledger.renew(old).verdict == "fenced"
    assert ledger.finish(old).verdict == "fenced"
    assert ledger.board(old).verdict == "fenced"
    assert ledger.run(ledger.calls.release(old)) == "fenced"
    assert ledger.run(ledger.calls.child_died("w1.1", "x", [old]))[0].verdict == "fenced"
    assert ledger.dump() == before
    assert ledger.step(write(new, 2)).verdict == "ok"


def test_an_owner_of_a_lost_history_is_told_apart_by_its_nonce_though_its_epoch_is_the_same(
    ledger: LedgerOnAClock,
) -> None:
    ledger.accept("j")
    first = ledger.claim("j")
    ledger.client.delete(keys.record("j"), keys.log("j"), keys.text("j"))  # a lost tail; the job is accepted again
    ledger.accept("j")
    second = ledger.claim("j")
    assert first.epoch == second.epoch
    assert ledger.step(write(first, 1)).verdict == "fenced"


def test_the_old_owner_writes_nothing_after_it_handed_the_job_back(ledger: LedgerOnAClock) -> None:
    old = ledger.ride("j", tokens=1)
    ledger.run(ledger.calls.release(old))
    before = ledger.dump()
    assert ledger.step(write(old, 2)).verdict == "fenced"
    assert ledger.renew(old).verdict == "fenced"
    assert ledger.dump() == before


def test_after_the_end_its_owner_is_told_how_it_ended_and_writes_nothing(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    assert ledger.finish(rider).verdict == "ended"
    before = ledger.dump()
    for answer in (ledger.step(write(rider, 2)), ledger.renew(rider), ledger.finish(rider, "failed")):
        assert (answer.verdict, answer.stop) == ("ended", "succeeded")
    assert ledger.dump() == before


def test_a_record_that_has_expired_gets_no_key_again(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    ledger.client.flushdb()
    assert ledger.step(write(rider, 2)).verdict == "fenced"
    assert ledger.renew(rider).verdict == "fenced"
    assert ledger.run(ledger.calls.release(rider)) == "fenced"
    assert ledger.run(ledger.calls.cancel("j")) == "gone"
    ledger.run(ledger.calls.child_died("w1.1", "x", [rider]))
    ledger.run(ledger.calls.unclaimed("j"))
    assert ledger.dump() == {}


def test_a_log_that_is_gone_is_not_made_again_by_a_step(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.client.delete(keys.log("j"))
    ledger.step(write(rider, 1))
    assert ledger.client.exists(keys.log("j")) == 0


def test_an_error_in_one_slot_does_not_touch_the_others(ledger: LedgerOnAClock) -> None:
    riders = [ledger.ride(f"j{i}") for i in range(4)]
    ledger.client.set(keys.log("j1"), "no stream")
    answers = ledger.run(ledger.calls.step([write(rider, 1) for rider in riders]))
    assert [answer.verdict for answer in answers] == ["ok", "error", "ok", "ok"]
    assert "WRONGTYPE" in answers[1].stop
    assert [ledger.k(f"j{i}") for i in range(4)] == [1, 0, 1, 1]


def test_a_step_renews_the_lease_and_takes_back_the_invitation(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.client.zadd(keys.invited(POOL), {"j": ledger.now_ms})
    ledger.advance(5)
    ledger.step(write(rider, 1))
    assert int(ledger.field("j", "lease")) == ledger.now_ms + 8000 == ledger.due("j")
    assert ledger.client.zscore(keys.invited(POOL), "j") is None


def test_an_owner_may_renew_a_lease_that_ran_out_unclaimed(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.let_lease_run_out(rider)
    assert ledger.renew(rider).verdict == "ok"
    assert ledger.try_claim("j")[0].verdict == "taken"


def test_a_renewal_does_not_look_at_the_position(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=3)
    answer = ledger.renew(rider)
    assert (answer.verdict, answer.k, answer.stop) == ("ok", 3, "")


def test_a_passed_deadline_is_told_to_the_owner_as_a_stop(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=5)
    rider = ledger.claim("j")
    ledger.advance(3)
    assert ledger.renew(rider).stop == ""
    ledger.advance(3)
    assert ledger.step(write(rider, 1)).stop == "expired"
    assert ledger.field("j", "stop") == "expired"


def test_boarding_is_recorded_at_the_ledger_s_position(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=2)
    ledger.board(rider)
    assert ledger.field("j", "boarded") == "2"


def test_boarding_at_a_wrong_position_is_not_recorded(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    rider = ledger.claim("j")
    answer = ledger.step(SlotWrite("j", rider.epoch, rider.nonce, first=5, board=True))
    assert (answer.verdict, answer.k) == ("at", 0)
    assert ledger.field("j", "boarded") == ""


def test_a_list_and_a_view_speak_of_what_is_there(ledger: LedgerOnAClock) -> None:
    for i in range(5):
        ledger.accept(f"j{i}")
    ledger.client.delete(keys.record("j2"))
    first, cursor = ledger.run(ledger.calls.list("all", "", 2))
    rest, end = ledger.run(ledger.calls.list("all", cursor, 10))
    assert [view["id"] for view in (*first, *rest)] == ["j4", "j3", "j1", "j0"]
    assert end == ""
    assert ledger.run(ledger.calls.view(["j2", "j0"]))[0] is None


def test_tokens_that_a_cache_had_are_those_of_the_first_ride(ledger: LedgerOnAClock) -> None:
    """What a later ride finds in a cache may be what the first one has computed."""
    for id, first_found, told in (("a", 3, {"cached_tokens": 3}), ("b", 0, None)):
        ledger.accept(id)
        first = ledger.claim(id)
        ledger.step(write(first, 1, 1, board=True, prompt_tokens=8, cached_tokens=first_found))
        ledger.let_lease_run_out(first)
        second = ledger.claim(id, worker="w2")
        ledger.step(write(second, 2, 1, prompt_tokens=8, cached_tokens=7))
        ledger.finish(second)
        view = ledger.view(id)
        assert view["usage"].get("prompt_tokens_details") == told
        assert view["usage"]["prompt_tokens"] == 8
