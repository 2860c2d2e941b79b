"""Whose turn it is: owners share a pool by the tokens that their jobs used, and each one's own order is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import redis

from tasks import keys
from tasks.priority import HIGH, LOW
from tasks.settings import Settings
from tests.ledger_counts import check_counts
from tests.ledger_harness import POOL, LedgerOnAClock, write

#: The pump keeps so many invited beyond the free slots.
AHEAD = 2


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def accept(ledger: LedgerOnAClock, owner: str, n: int, **more: int) -> list[str]:
    """So many jobs of an owner."""
    ids = [f"{owner}-{i}" for i in range(n)]
    for id in ids:
        ledger.accept(id, owner=owner, max_tokens=500, **more)
    return ids


class Worker:
    """One slot that takes jobs as they are invited. `uses`: tokens that a job makes, by its owner."""

    def __init__(self, ledger: LedgerOnAClock, uses: Callable[[str], int] = lambda _: 10) -> None:
        self._ledger = ledger
        self._uses = uses
        self._invited: list[str] = []

    def invite(self) -> list[str]:
        self._ledger.heartbeat(free=0 if self._invited else 1)
        self._invited += [one.id for one in self._ledger.pump()]
        return self._invited

    def run(self, jobs: int) -> list[str]:
        """Rides of so many jobs, one after the other, in the order of their invitations."""
        served = []
        for _ in range(jobs):
            self.invite()
            if not self._invited:
                break
            id = self._invited.pop(0)
            rider = self._ledger.claim(id)
            self._ledger.step(write(rider, 1, self._uses(id)))
            self._ledger.finish(rider)
            served.append(id)
        return served


def owners(ids: list[str]) -> Counter[str]:
    return Counter(id.split("-")[0] for id in ids)


def one_job_is_next(ledger: LedgerOnAClock) -> None:
    accept(ledger, "many", 1000)
    worker = Worker(ledger)
    worker.run(5)
    invited = list(worker.invite())
    accept(ledger, "one", 1)
    assert ledger.view("one-0")["queue_position"] == len(invited) + 1
    assert worker.run(len(invited) + 1) == [*invited, "one-0"]


def test_one_job_waits_only_for_what_rides_or_is_invited_whatever_another_owner_has_queued(
    ledger: LedgerOnAClock,
) -> None:
    one_job_is_next(ledger)


def one_job_is_next_whatever_was_used(ledger: LedgerOnAClock) -> None:
    accept(ledger, "many", 100)
    # its jobs cost less than was expected of them, so that it has paid too much
    lengths = iter([200] * 5 + [1] * 50)
    worker = Worker(ledger, lambda _: next(lengths))
    worker.run(9)
    invited = list(worker.invite())
    accept(ledger, "one", 1)
    accept(ledger, "other", 1)
    assert worker.run(len(invited) + 2) == [*invited, "one-0", "other-0"]


def test_nor_does_it_wait_for_what_another_owner_has_paid_too_much(ledger: LedgerOnAClock) -> None:
    one_job_is_next_whatever_was_used(ledger)


def shares_by_tokens(ledger: LedgerOnAClock) -> None:
    accept(ledger, "short", 400)
    accept(ledger, "long", 400)
    served = owners(Worker(ledger, lambda id: 100 if id.startswith("long") else 10).run(220))
    assert served["short"] / served["long"] == pytest.approx(10, rel=0.15)


def test_owners_that_both_wait_share_the_slots_by_the_tokens_that_they_really_use(ledger: LedgerOnAClock) -> None:
    shares_by_tokens(ledger)


def test_three_owners_have_a_third_each_and_come_in_turn(ledger: LedgerOnAClock) -> None:
    for owner in ("a", "b", "c"):
        accept(ledger, owner, 30)
    served = Worker(ledger).run(60)
    assert owners(served) == {"a": 20, "b": 20, "c": 20}
    assert all(set(owners(served[i : i + 3])) == {"a", "b", "c"} for i in range(6, 57, 3))
    for owner in ("a", "b", "c"):
        mine = [id for id in served if id.startswith(owner)]
        assert mine == [f"{owner}-{i}" for i in range(20)], "each one's own order is kept"


def positions_are_true(ledger: LedgerOnAClock) -> None:
    for owner, n in (("a", 12), ("b", 5), ("c", 1)):
        accept(ledger, owner, n)
    worker = Worker(ledger)
    worker.run(2)
    ids = [str(id) for id in ledger.client.zrange(keys.wait(POOL), 0, -1)]
    told = {id: ledger.view(id)["queue_position"] for id in ids}
    assert sorted(told.values()) == list(range(1, len(ids) + 1))
    assert worker.run(len(ids)) == sorted(ids, key=lambda id: told[id])


def test_a_position_counts_those_that_go_before(ledger: LedgerOnAClock) -> None:
    positions_are_true(ledger)


@pytest.mark.parametrize("pause_s", [0, 1, 60, 86400])
def test_a_pause_leaves_neither_credit_nor_debt(ledger: LedgerOnAClock, pause_s: float) -> None:
    """Alone for a while, then away while another is served: from then on half and half."""
    accept(ledger, "a", 30)
    worker = Worker(ledger)
    worker.run(30)
    ledger.advance(pause_s)
    for i in range(40):
        ledger.accept(f"b-{i}", owner="b")
    worker.run(20)
    for i in range(40):
        ledger.accept(f"a-again-{i}", owner="a")
    served = owners(worker.run(20 + AHEAD)[AHEAD:])
    assert abs(served["a"] - served["b"]) <= 2


def nothing_is_owed_to_nobody(ledger: LedgerOnAClock) -> None:
    """Much more was used than was expected, and nobody waited meanwhile."""
    worker = Worker(ledger, lambda id: 5000 if id.startswith("alone") else 10)
    accept(ledger, "before", 30)
    worker.run(30)
    accept(ledger, "alone", 2)
    worker.run(2)
    accept(ledger, "many", 100)
    worker.run(5)
    invited = list(worker.invite())
    ledger.accept("alone-again", owner="alone")
    assert ledger.view("alone-again")["queue_position"] == len(invited) + 1
    assert worker.run(len(invited) + 1) == [*invited, "alone-again"]


def test_what_was_used_while_nobody_waited_does_not_count_against_its_owner(ledger: LedgerOnAClock) -> None:
    nothing_is_owed_to_nobody(ledger)


def a_pause_is_no_credit(ledger: LedgerOnAClock) -> None:
    accept(ledger, "idle", 1)
    worker = Worker(ledger)
    worker.run(1)
    accept(ledger, "busy", 200)
    worker.run(100)
    for i in range(30):
        ledger.accept(f"idle-again-{i}", owner="idle")
    served = owners(worker.run(20 + AHEAD)[AHEAD:])
    assert abs(served["idle"] - served["busy"]) <= 2


def test_an_owner_that_was_idle_cannot_catch_up_on_what_it_did_not_use(ledger: LedgerOnAClock) -> None:
    a_pause_is_no_credit(ledger)


def a_loop_is_held_to_its_share(ledger: LedgerOnAClock) -> None:
    accept(ledger, "many", 200)
    worker = Worker(ledger, lambda id: 100 if id.startswith("loop") else 10)
    served: list[str] = []
    for i in range(60):
        if not ledger.client.exists(keys.own(POOL, "loop")):
            ledger.accept(f"loop-{i}", owner="loop")
        served += worker.run(1)
    used = {owner: n * (100 if owner == "loop" else 10) for owner, n in owners(served).items()}
    assert used["loop"] <= 1.6 * used["many"] + 200


def test_an_owner_that_sends_one_job_after_the_other_gets_no_more_than_its_share(ledger: LedgerOnAClock) -> None:
    a_loop_is_held_to_its_share(ledger)


def newcomers_starve_nobody(ledger: LedgerOnAClock) -> None:
    accept(ledger, "old", 3)
    worker = Worker(ledger)
    worker.invite()
    ledger.accept("waits-0", owner="waits")
    served: list[str] = []
    for i in range(20):
        ledger.accept(f"new{i}-0", owner=f"new{i}")
        served += worker.run(1)
    assert served.index("waits-0") <= 5
    assert served.index("new3-0") < served.index("new4-0") < served.index("new5-0")


def test_ever_new_owners_do_not_keep_an_older_one_waiting(ledger: LedgerOnAClock) -> None:
    newcomers_starve_nobody(ledger)


def test_priorities_order_the_jobs_of_one_owner(ledger: LedgerOnAClock) -> None:
    accept(ledger, "a", 4, priority=LOW)
    ledger.accept("a-high", owner="a", priority=HIGH)
    ledger.accept("b-low", owner="b", priority=LOW)
    served = Worker(ledger).run(6)
    assert [id for id in served if id.startswith("a")] == ["a-high", "a-0", "a-1", "a-2", "a-3"]
    assert served.index("b-low") <= 1, "and none keeps another owner waiting"


def one_job_is_next_again(ledger: LedgerOnAClock) -> None:
    """Two owners with much to do: neither of them has two in a row."""
    accept(ledger, "a", 20)
    accept(ledger, "b", 20)
    served = [id[0] for id in Worker(ledger).run(30)]
    assert all(served[i] != served[i + 1] for i in range(4, 29))


def each_owner_has_its_own_mean(ledger: LedgerOnAClock) -> None:
    accept(ledger, "short", 40)
    accept(ledger, "long", 40)
    Worker(ledger, lambda id: 40 if id.startswith("long") else 10).run(45)
    charged = {}
    for owner in ("short", "long"):
        paid = [ledger.field(f"{owner}-{i}", "charged") for i in range(40)]
        charged[owner] = int([price for price in paid if price][-1])
    assert charged == {"short": 10, "long": 40}


def test_what_a_job_costs_before_its_end_is_what_its_owner_s_jobs_used_lately(ledger: LedgerOnAClock) -> None:
    each_owner_has_its_own_mean(ledger)


def test_two_owners_take_turns(ledger: LedgerOnAClock) -> None:
    one_job_is_next_again(ledger)


def paid_once(ledger: LedgerOnAClock) -> None:
    accept(ledger, "a", 20)
    accept(ledger, "b", 20)
    ledger.heartbeat(free=0)
    for _ in range(5):
        ledger.pump()
        ledger.advance(4)  # the broker has lost them

    def paid() -> dict[str, float]:
        return {owner: float(str(ledger.client.zscore(keys.shares(POOL), owner))) for owner in ("a", "b")}

    assert [one.id for one in ledger.pump()] == ["a-0", "b-0"]
    assert paid() == {"a": 256, "b": 256}, "a guess, as nothing was measured yet"
    ledger.run(ledger.calls.release(ledger.claim("a-0")))
    assert paid() == {"a": 0, "b": 256}
    ledger.advance(4)
    assert [one.id for one in ledger.pump()] == ["b-0", "a-0"]
    assert paid() == {"a": 256, "b": 256}


def test_a_job_is_paid_for_once_however_often_it_is_invited_or_handed_back(ledger: LedgerOnAClock) -> None:
    paid_once(ledger)


def given_back(ledger: LedgerOnAClock) -> None:
    accept(ledger, "a", 3)
    ledger.accept("b-0", owner="b")
    ledger.heartbeat(free=0)
    assert [one.id for one in ledger.pump()] == ["a-0", "b-0"]
    ledger.run(ledger.calls.cancel("a-0"))
    assert float(str(ledger.client.zscore(keys.shares(POOL), "a"))) == 0


def test_a_job_that_is_cancelled_before_it_rides_costs_nothing(ledger: LedgerOnAClock) -> None:
    given_back(ledger)


def test_an_owner_whose_first_job_only_another_worker_may_take_does_not_block_the_others(
    ledger: LedgerOnAClock,
) -> None:
    rider = ledger.ride("a-0", tokens=2, fingerprint="gone")
    ledger.run(ledger.calls.release(rider))
    ledger.accept("all-1")
    ledger.accept("b-0", owner="b")
    ledger.heartbeat(free=1)
    assert {one.id for one in ledger.pump()} == {"all-1", "b-0"}


def test_many_owners_are_served_in_the_order_in_which_they_came(ledger: LedgerOnAClock) -> None:
    ids = [f"{n:03}-0" for n in range(200)]
    for id in ids:
        ledger.accept(id, owner=id[:3])
    assert ledger.view(ids[99])["queue_position"] == 100
    assert Worker(ledger).run(200) == ids
    check_counts(ledger.client, POOL)


def test_the_virtual_times_are_forgotten_an_hour_after_the_last_job(ledger: LedgerOnAClock) -> None:
    for n in range(50):
        ledger.accept(f"{n}-0", owner=f"old{n}")
    Worker(ledger).run(50)
    ledger.advance(3700)
    for n in range(200):
        ledger.accept(f"new-{n}", owner="new")
        ledger.run(ledger.calls.cancel(f"new-{n}"))
    assert len(ledger.client.hkeys(keys.use(POOL))) < 10
    assert int(str(ledger.client.ttl(keys.use(POOL)))) > 0
