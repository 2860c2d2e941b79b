"""Whatever breaks: each accepted job ends once, each token is there once, and nobody writes for another."""

from __future__ import annotations

from typing import ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.ledger_machine import JOBS, World
from tests.ledger_walk import walk
from tests.ledger_workers import FAULTS
from tests.mutation import Mutation
from tests.mutations import MUTATIONS

WALK_STEPS = 150
WORKERS = st.integers(0, 1)
IDS = st.sampled_from(JOBS)
CALLS = st.lists(st.sampled_from(("", *FAULTS)), min_size=1, max_size=3).map(tuple)


class LedgerMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens."""

    client: ClassVar[redis.Redis]

    @initialize(ids=st.sets(IDS, min_size=1))
    def begin(self, ids: set[str]) -> None:
        self.world = World(self.client)
        for id in sorted(ids):
            self.world.accept(id)

    @rule(id=IDS, twice=st.booleans())
    def accept(self, id: str, twice: bool) -> None:
        self.world.accept(id, twice)

    @rule(id=IDS)
    def cancel(self, id: str) -> None:
        self.world.cancel(id)

    @rule(i=WORKERS)
    def take_up(self, i: int) -> None:
        self.world.heartbeat(i)
        self.world.pump()
        self.world.fetch(i)
        self.world.settle(i)

    @rule(i=WORKERS, times=st.integers(1, 3))
    def ride(self, i: int, times: int) -> None:
        self.world.child_starts(i)
        for _ in range(times):
            self.world.settle(i)
            self.world.turn(i)

    @rule(i=WORKERS, calls=CALLS)
    def ride_with_faults(self, i: int, calls: tuple[str, ...]) -> None:
        self.world.fetch(i)
        self.world.turn(i)
        self.world.settle(i, calls)

    @rule(i=WORKERS)
    def ride_on(self, i: int) -> None:
        self.take_up(i)
        self.ride(i, 4)

    @rule(i=WORKERS, calls=CALLS)
    def renew(self, i: int, calls: tuple[str, ...]) -> None:
        self.world.renew(i, calls)

    @rule(i=WORKERS, seconds=st.sampled_from((1, 9, 12)), wakes=st.sampled_from((True, True, False)))
    def stall(self, i: int, seconds: int, wakes: bool) -> None:
        self.world.stall(i, seconds)
        if wakes:
            self.world.resume(i)

    @rule(i=WORKERS, what=st.sampled_from(("turn", "heartbeat", "resume", "drain", "reconnect")))
    def worker(self, i: int, what: str) -> None:
        getattr(self.world, what)(i)

    @rule(i=WORKERS, what=st.sampled_from(("child_dies", "child_dies", "worker_dies")))
    def process(self, i: int, what: str) -> None:
        getattr(self.world, what)(i)

    @rule(i=WORKERS, times=st.integers(1, 3), fails=st.booleans(), calls=CALLS)
    def deliver(self, i: int, times: int, fails: bool, calls: tuple[str, ...]) -> None:
        self.world.look_for_webhooks(i)
        for _ in range(times):
            self.world.deliver(i, fails, calls)

    @rule(i=WORKERS, what=st.sampled_from(("deliverer_dies", "deliverer_sleeps_or_wakes")))
    def deliverer(self, i: int, what: str) -> None:
        getattr(self.world, what)(i)

    @rule(what=st.sampled_from(("lose_webhook_message", "double_webhook_message")))
    def broker_of_webhooks(self, what: str) -> None:
        getattr(self.world, what)()

    @rule(what=st.sampled_from(("lose_message", "double_message", "visibility_runs_out")))
    def broker(self, what: str) -> None:
        getattr(self.world, what)()

    @rule(seconds=st.sampled_from((1, 3, 9)))
    def advance(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule(seconds=st.sampled_from((5, 30)))
    def outage(self, seconds: int) -> None:
        self.world.outage(seconds)

    @rule(what=st.sampled_from(("take_snapshot", "lose_tail")))
    def disk(self, what: str) -> None:
        getattr(self.world, what)()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def run_machine(client: redis.Redis, examples: int, steps: int) -> None:
    machine = type("LedgerMachineHere", (LedgerMachine,), {"client": client})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            # to shrink a history takes minutes: take `Phase.shrink` in when there is one to look at
            phases=(Phase.generate,),
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run_walk(client: redis.Redis, seed: int, mutation: Mutation | None = None) -> None:
    walk(World(client, mutation.scripts() if mutation else None), seed, WALK_STEPS)


def test_the_ledger_holds_through_histories_that_hypothesis_makes_up(redis_client: redis.Redis) -> None:
    run_machine(redis_client, examples=40, steps=50)


@pytest.mark.parametrize("seed", range(25))
def test_the_ledger_holds_through_a_random_walk(redis_client: redis.Redis, seed: int) -> None:
    run_walk(redis_client, seed)


@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.walk], ids=lambda one: one.name)
def test_a_random_walk_finds_a_fence_that_is_missing(redis_client: redis.Redis, mutation: Mutation) -> None:
    for seed in range(40):
        try:
            run_walk(redis_client, seed, mutation)
        except (AssertionError, redis.ResponseError):
            return
    pytest.fail(f"40 walks without the fence {mutation.name!r} went well")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ledger_holds_through_many_long_histories(redis_client: redis.Redis) -> None:
    run_machine(redis_client, examples=600, steps=80)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ledger_holds_through_many_random_walks(redis_client: redis.Redis) -> None:
    for seed in range(1000, 2500):
        run_walk(redis_client, seed)
