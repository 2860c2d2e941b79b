"""The ledger's side of the rides over the real scripts: lost answers, rides that are over, messages that come twice."""

from __future__ import annotations

import pytest
import redis

from tasks import entries, keys
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, restore, snapshot, token, well_formed, word
from tests.ledger_workers import RUN_AHEAD, Script, SimulatedWorker
from worker.messages import Abort
from worker.workload_manager import Ride, RideState, WorkloadManager


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def worker_of(ledger: LedgerOnAClock, **scripts: Script) -> SimulatedWorker:
    worker = SimulatedWorker("w1", ledger, {"j": Script(10), **scripts}, lambda: None)
    worker.heartbeat()
    return worker


def riding(ledger: LedgerOnAClock, *ids: str, tokens: int = 2) -> SimulatedWorker:
    """A worker that rides these jobs, each with so many tokens in the ledger."""
    worker = worker_of(ledger, **{id: Script(10) for id in ids})
    for id in ids:
        ledger.accept(id)
        worker.offer(id, f"tag-{id}")
    worker.settle()
    for _ in range(tokens):
        worker.turn()
        worker.settle()
    assert [ledger.k(id) for id in ids] == [tokens] * len(ids)
    return worker


def ride_of(worker: SimulatedWorker, id: str = "j") -> Ride:
    ride = worker.slots.get(id)
    assert ride is not None
    return ride


def silence(ledger: LedgerOnAClock) -> None:
    """The lease of every rider runs out while the keeper lives."""
    ledger.client.set(keys.TICK, ledger.now_ms)
    ledger.keep_ticking(ledger.settings.lease_s + 0.1)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_whose_answer_was_lost_is_ours_when_it_is_sent_again(ledger: LedgerOnAClock) -> None:
    worker = worker_of(ledger)
    ledger.accept("j")
    worker.offer("j", "tag")
    worker.settle(("reply lost",))
    assert worker.slots.get("j") is None
    worker.settle()
    assert ride_of(worker).state is RideState.BOARDED
    assert ledger.field("j", "epoch") == "1"


def test_a_record_that_cannot_be_read_ends_its_job_alone(ledger: LedgerOnAClock) -> None:
    worker = worker_of(ledger, beside=Script(10))
    ledger.accept("j", params='{"max_tokens":8,"temperature":-1}')
    ledger.accept("beside")
    worker.offer("j", "tag")
    worker.offer("beside", "tag-beside")
    worker.settle(("", "reply lost"))
    worker.settle()
    view = ledger.view("j")
    assert (view["status"], view["error"]["code"]) == ("failed", "engine_error")
    assert "temperature" in view["error"]["message"]
    assert list(worker.celery.unacked) == ["tag-beside"]
    assert worker.slots.get("j") is None
    assert ride_of(worker, "beside").state is RideState.BOARDED


def test_a_job_of_a_newer_release_is_not_asked_for_again_at_once(ledger: LedgerOnAClock) -> None:
    worker = worker_of(ledger)
    ledger.accept("j")
    ledger.client.hset(keys.record("j"), "v", entries.VERSION + 1)
    assert [invitation.id for invitation in ledger.pump()] == ["j"]
    worker.offer("j", "tag")
    worker.settle()
    assert not worker.celery.unacked
    assert ledger.status("j") == "queued"
    assert ledger.pump() == []
    ledger.advance(3.1)
    assert [invitation.id for invitation in ledger.pump()] == ["j"]


def test_a_job_is_not_taken_up_before_its_log_is_read(ledger: LedgerOnAClock) -> None:
    ledger.run(ledger.calls.release(ledger.ride("j", tokens=3)))
    worker = worker_of(ledger)
    worker.offer("j", "tag")
    worker.settle(("", "reply lost"))
    assert worker.slots.get("j") is None
    worker.settle()
    assert ride_of(worker).texts == [word(n) for n in (1, 2, 3)]
    assert ledger.field("j", "epoch") == "2"


# --- messages ---------------------------------------------------------------------------------------------------------


def test_another_message_for_a_job_that_rides_here_is_acknowledged(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    worker.offer("j", "another")
    worker.settle()
    assert set(worker.celery.unacked) == {"tag-j"}


def test_the_same_message_again_is_kept_until_the_job_ends(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    worker.offer("j", "tag-j")
    worker.settle()
    assert set(worker.celery.unacked) == {"tag-j"}
    for _ in range(8):
        worker.turn()
        worker.settle()
    assert worker.celery.unacked == {}
    assert worker.celery.reported == [("j", "succeeded")]


# --- rides that are over ----------------------------------------------------------------------------------------------


def test_a_job_that_ended_behind_our_back_leaves_the_child_before_its_slot_is_free(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    silence(ledger)
    ledger.run(ledger.calls.cancel("j"))
    assert ledger.status("j") == "cancelled"
    worker.turn()
    worker.settle()
    assert ride_of(worker).state is RideState.LEAVING
    worker.turn()
    worker.settle()
    assert worker.child is not None
    assert worker.child.riding == {}
    assert worker.slots.num_free == 2
    assert worker.celery.reported == [("j", "cancelled")], "what the ledger says, not what we had in mind"
    well_formed(ledger.log("j"))


def test_a_renewal_learns_of_an_end_as_well(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    silence(ledger)
    ledger.run(ledger.calls.cancel("j"))
    worker.renew()
    assert ride_of(worker).over_as == "cancelled"


def test_a_job_that_was_lost_is_not_taken_up_again_while_its_old_tokens_are_on_their_way(
    ledger: LedgerOnAClock,
) -> None:
    worker = riding(ledger, "j")
    worker.turn()  # a token that the parent has not seen
    silence(ledger)
    other = ledger.claim("j", worker="w2")
    worker.renew()
    ledger.run(ledger.calls.release(other))
    worker.offer("j", "another")
    worker.settle()
    assert ledger.status("j") == "queued"
    worker.turn()
    worker.settle()
    assert worker.slots.get("j") is None
    worker.offer("j", "third")
    worker.settle()
    for _ in range(8):
        worker.turn()
        worker.settle()
    assert ledger.view("j")["text"] == "".join(map(word, range(1, 11)))


def test_an_error_of_one_slot_does_not_lose_what_boards_beside_it(
    ledger: LedgerOnAClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkloadManager, "has_suspects", True)  # so that nothing boards with its claim
    worker = worker_of(ledger, broken=Script(3))
    for id in ("j", "broken"):
        ledger.accept(id)
        worker.offer(id, id)
        worker.settle(("", "request lost"))  # claimed, and not boarded yet
    ledger.client.set(keys.record("broken"), "no hash")
    worker.settle()
    assert [ride_of(worker, id).state for id in ("j", "broken")] == [RideState.BOARDED, RideState.CLAIMED]
    worker.turn()
    worker.settle()
    assert ledger.k("j") == 1


def test_a_renewal_that_was_refused_is_no_wish_to_stop(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    ledger.client.set(keys.invited(POOL), "no zset")
    worker.renew()
    assert ride_of(worker).state is RideState.BOARDED
    ledger.client.delete(keys.invited(POOL))


def test_what_a_lost_tail_took_is_sent_again(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j", tokens=2)
    on_disk = snapshot(ledger.client)
    worker.turn()
    worker.turn()
    worker.settle()
    assert ledger.k("j") == 4
    restore(ledger.client, on_disk)
    assert ledger.k("j") == 2
    worker.turn()
    worker.settle()
    well_formed(ledger.log("j"))
    assert ledger.view("j")["text"] == "".join(map(word, range(1, 6)))


def test_logprobs_that_a_lost_tail_took_are_sent_again_and_the_next_owner_has_them(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j", tokens=0)
    ride = ride_of(worker)

    def computed(n: int) -> None:
        ride.ids.append(token(n))
        ride.texts.append(word(n))
        ride.lp.append({"id": token(n), "lp": -n / 4, "b": [n], "top": []})
        worker.settle()

    for n in (1, 2):
        computed(n)
    on_disk = snapshot(ledger.client)
    computed(3)
    restore(ledger.client, on_disk)
    assert ledger.k("j") == 2
    computed(4)

    well_formed(ledger.log("j"))
    assert [item["id"] for entry in ledger.log("j") for item in entry.lp] == [token(n) for n in (1, 2, 3, 4)]
    ledger.run(ledger.calls.release(ride.rider))
    other = worker_of(ledger)
    other.offer("j", "tag")
    other.settle()
    assert ride_of(other).lp == ride.lp


def test_a_stop_takes_the_sequence_out_before_the_status_says_so(ledger: LedgerOnAClock) -> None:
    worker = riding(ledger, "j")
    ledger.run(ledger.calls.cancel("j"))
    worker.renew()
    assert ledger.status("j") == "running"
    assert worker.child is not None
    assert list(worker.child.commands) == [Abort("j")]
    worker.turn()
    worker.settle()
    assert ledger.status("j") == "cancelled"


# --- who boards -------------------------------------------------------------------------------------------------------


def slots_with(*rides: Ride) -> WorkloadManager:
    slots = WorkloadManager(4, RUN_AHEAD)
    for ride in rides:
        slots.add(ride)
    return slots


def a_ride(ledger: LedgerOnAClock, id: str, strikes: int = 0) -> Ride:
    ledger.accept(id)
    claim, nonce = ledger.try_claim(id)
    ride = Ride.from_claim(id, nonce, claim)
    ride.strikes, ride.struck_at = strikes, 0
    return ride


def test_a_suspect_boards_alone_and_others_may_board_beside_each_other(ledger: LedgerOnAClock) -> None:
    suspect, first, second = a_ride(ledger, "s", strikes=1), a_ride(ledger, "a"), a_ride(ledger, "b")
    assert slots_with(suspect, first, second).next_to_board() == [first, second]
    assert slots_with(suspect).next_to_board() == [suspect]


def test_a_suspect_has_its_turn_though_new_jobs_keep_coming(ledger: LedgerOnAClock) -> None:
    suspect = a_ride(ledger, "s", strikes=1)
    slots = slots_with(suspect)
    for i in range(12):
        fresh = a_ride(ledger, f"f{i}")
        slots.add(fresh)
        boarding = slots.next_to_board()
        if suspect in boarding:
            break
        for ride in boarding:
            ride.boarded()
        gone = next((ride for ride in slots.rides if ride is not suspect and ride.in_child and ride is not fresh), None)
        if gone is not None:
            slots.remove(gone.id)
        elif len(slots) == slots.num_slots:
            slots.remove(fresh.id)
    assert suspect in slots.next_to_board()
    assert i <= 4
