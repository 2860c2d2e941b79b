"""The ledger's scripts on a real server: accept and claim."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from tasks import keys
from tasks.ledger_types import Rider
from tasks.redis_clients import is_full
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, acceptance, write
from tests.redis_server import RedisServer


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


# --- accept -----------------------------------------------------------------------------------------------------------


def test_an_accepted_job_is_recorded_waits_and_is_due_at_its_deadline(ledger: LedgerOnAClock) -> None:
    assert ledger.accept("j", deadline_s=60).verdict == "ok"
    record = ledger.record("j")
    assert (record["status"], record["epoch"], record["k"], record["seed"]) == ("queued", "0", "0", "7")
    assert ledger.client.zrange(keys.wait(POOL), 0, -1) == ["j"]
    assert ledger.due("j") == int(record["deadline"]) == ledger.now_ms + 60_000
    assert ledger.raw_log("j") == []


def test_an_acceptance_may_invite_in_the_same_call(ledger: LedgerOnAClock) -> None:
    def accepted(id: str) -> list[str]:
        answer = ledger.run(ledger.calls.accept(acceptance(id), invite=True))
        return [invitation.id for invitation in answer.invitations]

    assert accepted("nobody-is-ready") == []
    ledger.heartbeat(free=1)
    assert accepted("first") == ["nobody-is-ready", "first"]
    assert accepted("second") == ["second"]
    assert accepted("third") == []
    assert accepted("first") == []


def test_the_same_acceptance_again_changes_nothing(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", idempotency="i", body_hash="b")
    before = ledger.dump()
    assert ledger.accept("j", idempotency="i", body_hash="b").verdict == "again"
    assert ledger.accept("j").verdict == "again"
    assert ledger.dump() == before


def test_a_known_idempotency_key_gives_its_job_and_another_body_is_a_conflict(ledger: LedgerOnAClock) -> None:
    ledger.accept("first", idempotency="i", body_hash="b")
    before = ledger.dump()
    again = ledger.accept("second", idempotency="i", body_hash="b")
    other = ledger.accept("third", idempotency="i", body_hash="other")
    assert (again.verdict, again.id) == ("again", "first")
    assert (other.verdict, other.id) == ("conflict", "first")
    assert ledger.dump() == before


def test_an_idempotency_key_is_known_while_its_job_runs_and_after_its_end(ledger: LedgerOnAClock) -> None:
    ledger.accept("first", idempotency="i", body_hash="b")
    rider = ledger.claim("first")
    assert ledger.accept("second", idempotency="i", body_hash="b").id == "first"
    ledger.finish(rider)
    assert ledger.accept("second", idempotency="i", body_hash="b").id == "first"


def test_an_idempotency_key_outlives_the_retention_where_it_is_promised_for_longer(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings(retention_s=5, idempotency_s=500))
    ledger.accept("j", idempotency="i", body_hash="b", deadline_s=10)
    accepted = [int(str(redis_client.pexpiretime(key))) for key in (keys.record("j"), "{carpool}:idem:i")]
    assert accepted == [ledger.now_ms + 510_000] * 2
    ledger.finish(ledger.claim("j"))
    ended = [int(str(redis_client.pexpiretime(key))) for key in (keys.record("j"), "{carpool}:idem:i")]
    assert ended == [ledger.now_ms + 500_000] * 2
    assert int(str(redis_client.pexpiretime("{carpool}:jobs:all"))) >= ended[0]


def test_a_group_is_accepted_whole_with_children_in_order(ledger: LedgerOnAClock) -> None:
    assert ledger.accept_group("g", n=3).verdict == "ok"
    assert ledger.client.zrange(keys.wait(POOL), 0, -1) == ["g.0", "g.1", "g.2"]
    assert [ledger.field(f"g.{i}", "seed") for i in range(3)] == ["0", "1", "2"]
    assert {ledger.field(f"g.{i}", "group") for i in range(3)} == {"g"}
    view = ledger.view("g")
    assert (view["status"], view["children"], view["texts"]) == ("queued", ["g.0", "g.1", "g.2"], ["", "", ""])


def test_the_same_group_again_changes_nothing(ledger: LedgerOnAClock) -> None:
    ledger.accept_group("g", n=2)
    before = ledger.dump()
    assert ledger.accept_group("g", n=2).verdict == "again"
    assert ledger.accept("g").verdict == "again"
    assert ledger.dump() == before


def test_a_native_task_that_has_ended_and_gone_is_not_run_again(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", native=True)
    ledger.finish(ledger.claim("j"))
    ledger.client.delete(keys.record("j"))
    assert ledger.accept("j", native=True).verdict == "tomb"
    assert ledger.accept("j").verdict == "ok"


def test_a_full_server_refuses_a_group_whole_and_lets_running_jobs_end(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        ledger = LedgerOnAClock(client, Settings())
        rider = ledger.ride("j", tokens=2)
        client.config_set("maxmemory", "1")
        with pytest.raises(ResponseError) as refused:
            ledger.accept_group("g", n=3)
        assert is_full(refused.value)
        assert [client.exists(f"{{carpool}}:{name}") for name in ("g:g", "j:g.0", "j:g.1", "j:g.2")] == [0, 0, 0, 0]
        assert ledger.step(write(rider, 3)).verdict == "ok"
        assert ledger.finish(rider).verdict == "ended"
        assert ledger.view("j")["text"] == "t1 t2 t3 "


# --- claim ------------------------------------------------------------------------------------------------------------


def test_a_claim_gives_one_owner_an_epoch_and_a_marker_in_the_log(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    claim, nonce = ledger.try_claim("j")
    assert (claim.verdict, claim.epoch, claim.k, claim.seed, claim.input) == ("ok", 1, 0, 7, {"prompt": "x"})
    record = ledger.record("j")
    assert (record["status"], record["owner"], record["boarded"]) == ("running", nonce, "")
    assert int(record["lease"]) == ledger.now_ms + 8000 == ledger.due("j")
    assert [(id, entry.kind) for (id, _), entry in zip(ledger.raw_log("j"), ledger.log("j"), strict=True)] == [
        ("1-0", "marker")
    ]
    assert ledger.client.zcard(keys.wait(POOL)) == 0
    assert ledger.celery_record("j")["status"] == "STARTED"


def test_the_same_claim_again_is_granted_and_changes_nothing(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    first, nonce = ledger.try_claim("j")
    before = ledger.dump()
    again, _ = ledger.try_claim("j", nonce=nonce)
    assert again == first
    assert ledger.dump() == before


def test_a_claim_may_board_a_job_in_the_same_call_and_says_so_again(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j", tokens=2)))
    claim, nonce = ledger.try_claim("j", board=True)
    assert (claim.verdict, claim.boarded, ledger.field("j", "boarded")) == ("ok", True, "2")
    before = ledger.dump()
    assert ledger.try_claim("j", nonce=nonce, board=True)[0] == claim
    assert ledger.dump() == before


def test_a_claim_does_not_board_a_job_that_something_died_with(ledger: LedgerOnAClock) -> None:
    ledger.let_lease_run_out(ledger.ride("j"))
    claim, _ = ledger.try_claim("j", board=True)
    assert (claim.verdict, claim.boarded, claim.strikes) == ("ok", False, 1)
    assert ledger.field("j", "boarded") == ""


def test_a_job_that_is_ridden_is_taken(ledger: LedgerOnAClock) -> None:
    ledger.ride("j")
    before = ledger.dump()
    assert ledger.try_claim("j")[0].verdict == "taken"
    assert ledger.dump() == before


def test_a_job_that_nobody_knows_is_gone_and_gets_no_key(ledger: LedgerOnAClock) -> None:
    assert ledger.try_claim("nobody")[0].verdict == "gone"
    assert ledger.dump() == {}


def test_a_job_that_has_ended_is_not_claimed(ledger: LedgerOnAClock) -> None:
    ledger.finish(ledger.ride("j"))
    before = ledger.dump()
    assert ledger.try_claim("j")[0].verdict == "ended"
    assert ledger.dump() == before


def test_a_record_of_a_newer_release_is_not_claimed(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.client.hset(keys.record("j"), "v", 2)
    assert ledger.try_claim("j")[0].verdict == "newer"
    assert ledger.status("j") == "queued"


def test_a_lease_that_has_run_out_goes_to_another_owner_at_the_job_s_position(ledger: LedgerOnAClock) -> None:
    old = ledger.ride("j", tokens=2)
    ledger.let_lease_run_out(old)
    claim, _ = ledger.try_claim("j", worker="w2")
    assert (claim.verdict, claim.epoch, claim.k) == ("ok", 2, 2)
    assert [id for id, _ in ledger.raw_log("j")] == ["1-0", "1-2", "2-2"]


def test_after_an_outage_nobody_s_lease_is_taken_for_one_grace(ledger: LedgerOnAClock) -> None:
    ledger.ride("j")
    ledger.advance(60)
    assert ledger.try_claim("j")[0].verdict == "taken", "the reaper has not ticked yet"
    ledger.reap()
    assert ledger.try_claim("j")[0].verdict == "taken", "grace"
    ledger.keep_ticking(ledger.settings.grace_s)
    assert ledger.try_claim("j")[0].verdict == "ok"


def test_another_model_does_not_go_on_with_tokens_that_are_there(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j", tokens=2)))
    ledger.heartbeat()
    ledger.pump()
    assert ledger.try_claim("j", fingerprint="other")[0].verdict == "mismatch"
    assert ledger.client.zscore(keys.invited(POOL), "j") is None
    assert ledger.status("j") == "queued"
    assert ledger.try_claim("j")[0].verdict == "ok"


def test_another_model_may_start_a_job_without_tokens(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j")))
    assert ledger.try_claim("j", fingerprint="other")[0].verdict == "ok"
    assert ledger.field("j", "fingerprint") == "other"


def test_a_claim_of_a_job_that_is_to_stop_ends_it(ledger: LedgerOnAClock) -> None:
    ledger.ride("j")
    ledger.run(ledger.calls.cancel("j"))
    ledger.advance(9)
    ledger.client.set(keys.TICK, ledger.now_ms)
    assert ledger.try_claim("j")[0].verdict == "ended"
    assert ledger.status("j") == "cancelled"


def test_a_claim_after_the_deadline_ends_the_job(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", deadline_s=5)
    ledger.advance(6)
    assert ledger.try_claim("j")[0].verdict == "ended"
    assert ledger.status("j") == "expired"


def test_taking_over_a_boarded_job_counts_as_a_death_and_three_at_one_place_end_it(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j", tokens=1)
    for deaths in (1, 2):
        ledger.let_lease_run_out(rider)
        claim, nonce = ledger.try_claim("j")
        assert (claim.verdict, claim.strikes, claim.struck_at) == ("ok", deaths, 1)
        rider = Rider("j", claim.epoch, nonce)
        ledger.board(rider)
    ledger.let_lease_run_out(rider)
    assert ledger.status("j") == "failed", "the reaper ends it, without waiting for a claim"
    error = ledger.view("j")["error"]
    assert error["code"] == "worker_died"
    assert error["message"].count("at token 2: its worker died") == 3
    assert ledger.view("j")["text"] == "t1 "


def test_a_claim_that_finds_one_death_too_many_ends_the_job(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.client.hset(keys.record("j"), mapping={"strikes": 2, "struck_at": 0, "deaths": 2})
    ledger.advance(9)
    ledger.client.set(keys.TICK, ledger.now_ms)
    assert ledger.try_claim("j")[0].verdict == "ended"
    assert ledger.status("j") == "failed"
    assert ledger.step(write(rider, 1)).verdict == "ended"


def test_deaths_at_different_places_are_counted_too(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    for position in range(1, 10):
        ledger.step(write(rider, position))
        ledger.let_lease_run_out(rider)
        rider = ledger.claim("j")
        ledger.board(rider)
    ledger.step(write(rider, 10))
    ledger.let_lease_run_out(rider)
    assert ledger.status("j") == "failed"
    assert "10 times in all" in ledger.view("j")["error"]["message"]


def test_deaths_before_boarding_are_no_strike_but_claims_are_bounded(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    rider = ledger.claim("j")
    for _ in range(19):
        ledger.let_lease_run_out(rider)
        rider = ledger.claim("j")
    assert ledger.field("j", "strikes") == "0"
    ledger.let_lease_run_out(rider)
    assert ledger.try_claim("j")[0].verdict == "ended"
    assert ledger.view("j")["error"]["code"] == "claims_exhausted"


def test_a_death_before_boarding_after_a_ride_is_no_strike(ledger: LedgerOnAClock) -> None:
    ledger.let_lease_run_out(ledger.ride("j", tokens=1))
    claimed = ledger.claim("j")
    ledger.let_lease_run_out(claimed)
    ledger.claim("j")
    assert (ledger.field("j", "deaths"), ledger.field("j", "strikes")) == ("1", "1")


def test_a_token_or_a_hand_back_starts_the_count_of_claims_anew(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    ledger.client.hset(keys.record("j"), "claims", 20)
    ledger.step(write(rider, 1))
    ledger.let_lease_run_out(rider)
    rider = ledger.claim("j")
    assert ledger.field("j", "claims") == "1"
    ledger.client.hset(keys.record("j"), "claims", 20)
    ledger.run(ledger.calls.release(rider))
    ledger.claim("j")
    assert ledger.field("j", "claims") == "1"
