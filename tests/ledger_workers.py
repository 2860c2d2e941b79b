"""Workers without processes: the real Publisher and slots over the very scripts, a child that is a few lines of Python.

What lies between them can be lost: any call's request or reply, any message of the broker, a worker, its child.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from tasks import keys
from tasks.calls import Call
from tests.ledger_harness import POOL, PRINT, LedgerOnAClock, token, word
from worker.delivery import CelerySide, Delivery
from worker.messages import Abort, Add, Command
from worker.publisher import Publisher
from worker.workload_manager import End, RideState, WorkloadManager

T = TypeVar("T")
SLOTS = 2
RUN_AHEAD = 2

#: What becomes of one call: its request is lost, its reply is lost, or the client sent it a second time.
FAULTS = ("request lost", "reply lost", "sent twice")


class FaultyClient(redis.Redis):
    """Reads a log, unless that is what fails now."""

    def __init__(self, client: redis.Redis, faults: deque[str]) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._faults = faults

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "XRANGE" and self._faults and self._faults.popleft().endswith("lost"):
            raise RedisConnectionError("the log could not be read")
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class FaultyLedger(LedgerOnAClock):
    """The ledger as one worker sees it. `faults` holds, for the worker's next calls, what becomes of each."""

    def __init__(self, ledger: LedgerOnAClock) -> None:
        self.faults: deque[str] = deque()
        super().__init__(FaultyClient(ledger.client, self.faults), ledger.settings)
        self._ledger = ledger

    def run(self, call: Call[T]) -> T:
        fault = self.faults.popleft() if self.faults else ""
        if fault == "request lost":
            raise RedisConnectionError(fault)
        answer = self._ledger.run(call)
        if fault == "sent twice":
            answer = self._ledger.run(call)
        if fault == "reply lost":
            raise RedisConnectionError(fault)
        return answer

    def run_all(self, calls: Iterable[Call[T]]) -> list[T]:
        """One round trip, one fault."""
        todo = list(calls)
        fault = self.faults.popleft() if self.faults else ""
        if fault == "request lost":
            raise RedisConnectionError(fault)
        answers = [self._ledger.run(call) for call in todo]
        if fault == "sent twice":
            answers = [self._ledger.run(call) for call in todo]
        if fault == "reply lost":
            raise RedisConnectionError(fault)
        return answers


class RecordedCelery(CelerySide):
    """Notes which messages are unacknowledged, and which ends were reported."""

    def __init__(self) -> None:
        super().__init__()
        self.unacked: dict[str, Delivery] = {}
        self.reported: list[tuple[str, str]] = []

    def started(self, delivery: Delivery) -> None:
        pass

    def ended(self, delivery: Delivery, status: str, summary: str, runtime_s: float) -> None:
        self.unacked.pop(delivery.tag, None)
        self.reported.append((delivery.id, status))

    def given_up(self, delivery: Delivery) -> None:
        self.unacked.pop(delivery.tag, None)


@dataclass(frozen=True, slots=True)
class Script:
    """What a job's sequence does: it ends after `length` tokens, or kills its child at token `poison_at` (0: never)."""

    length: int
    poison_at: int = 0


@dataclass(slots=True)
class Child:
    """A Model worker: commands in, deltas out, a few steps ahead of what the ledger holds."""

    scripts: dict[str, Script]
    commands: deque[Command] = field(default_factory=deque)
    updates: deque[tuple[str, str, tuple[int, ...]]] = field(default_factory=deque)
    riding: dict[str, int] = field(default_factory=dict)
    unaccepted: int = 0

    def turn(self) -> bool:
        """Take the commands and compute one step. Returns False where a sequence has killed the process."""
        while self.commands:
            match self.commands.popleft():
                case Add() as add:
                    assert len(self.riding) < SLOTS, "more sequences than slots"
                    self.riding[add.id] = len(add.ids)
                case Abort() as abort:
                    self.riding.pop(abort.id, None)
                    self.updates.append(("aborted", abort.id, ()))
        if self.unaccepted >= RUN_AHEAD or not self.riding:
            return True
        for id, have in list(self.riding.items()):
            script = self.scripts[id]
            if have + 1 == script.poison_at:
                return False
            if have < script.length:
                self.riding[id] = have + 1
                self.updates.append(("token", id, (have + 1,)))
            if self.riding[id] >= script.length:
                del self.riding[id]
                self.updates.append(("finished", id, ()))
        self.unaccepted += 1
        self.updates.append(("stepped", "", ()))
        return True


class SimulatedWorker:
    """A worker process: what `LLMEngine` does in one pass, without its threads."""

    _tags = itertools.count(1)

    def __init__(self, name: str, ledger: LedgerOnAClock, scripts: dict[str, Script], pump: Callable[[], None]) -> None:
        self.name = name
        self.incarnation = f"{name}.{next(self._tags)}"
        self.paused = False
        self.ledger = FaultyLedger(ledger)
        self.celery = RecordedCelery()
        self.slots = WorkloadManager(SLOTS, RUN_AHEAD)
        self.child: Child | None = Child(scripts)
        self._scripts = scripts
        self._generation = 1
        self._deaths: list[int] = []
        self._postponed: list[Delivery] = []
        self._publisher = Publisher(self.ledger, self.slots, self.celery, self._send, lambda _: pump(), POOL)

    def _send(self, command: Command) -> None:
        if self.child is not None:
            self.child.commands.append(command)

    @property
    def may_fetch(self) -> bool:
        """The broker's bound and gate."""
        return self.child is not None and self.slots.num_free > 0 and len(self.celery.unacked) < SLOTS

    def offer(self, id: str, tag: str) -> None:
        delivery = Delivery(id, tag, False, None, None)
        self.celery.unacked[tag] = delivery
        self._postponed.append(delivery)

    def turn(self) -> None:
        """The child computes; what it says waits for the next pass of the parent."""
        if self.child is not None and not self.child.turn():
            self.child_dies()

    def child_dies(self) -> None:
        """Everything that it has said reaches the parent first."""
        if self.child is None:
            return
        self._take_updates()
        self.child = None
        self._deaths.append(self._generation)
        for ride in self.slots.rides:
            if ride.state is RideState.LEAVING:
                ride.left()

    def child_starts(self) -> None:
        if self.child is None and not self._deaths:
            self.child = Child(self._scripts)
            self._generation += 1

    def settle(self, faults: tuple[str, ...] = ()) -> None:
        """One pass: everything into the ledger, then new rides. A call that fails ends the pass, as in the engine."""
        self.ledger.faults.extend(faults)
        steps = self._take_updates()
        try:
            self._publisher.flush()
            for generation in self._deaths:
                self._publisher.charge(f"{self.incarnation}.{generation}", "exit code 137")
            if self._deaths:
                self._deaths.clear()
                self._publisher.hand_to_others(self.incarnation)
            if self.child is not None:
                self.child.unaccepted -= steps
                steps = 0
            while self._postponed:
                together = self._publisher.claimable(self._postponed)
                if len(together) > 1 and self.child is not None:
                    for ride in self._publisher.claim(together, PRINT, self.incarnation, self.name):
                        del self._postponed[0]
                        if ride is not None:
                            self._send(ride.add_command())
                else:
                    self._take(self._postponed[0])
                    del self._postponed[0]
            if self.child is not None:
                for ride in self._publisher.board():
                    self._send(ride.add_command())
        except (RedisError, OSError):
            if self.child is not None and steps:
                self.child.updates.extendleft([("stepped", "", ())] * steps)
        finally:
            self.ledger.faults.clear()

    def _take(self, delivery: Delivery) -> None:
        if self._publisher.adopt(delivery):
            return
        if self.slots.num_free <= 0 or self.child is None:
            self._publisher.refuse(delivery)
        else:
            for ride in self._publisher.claim([delivery], PRINT, self.incarnation, self.name):
                if ride is not None:
                    self._send(ride.add_command())

    def _take_updates(self) -> int:
        steps = 0
        updates = self.child.updates if self.child is not None else deque[tuple[str, str, tuple[int, ...]]]()
        while updates:
            kind, id, numbers = updates.popleft()
            if kind == "stepped":
                steps += 1
                continue
            ride = self.slots.get(id)
            if ride is None:
                continue
            if kind == "aborted" and ride.state is RideState.LEAVING:
                ride.left()
            elif kind == "token" and ride.in_child:
                ride.ids.extend(map(token, numbers))
                ride.texts.extend(map(word, numbers))
            elif kind == "finished" and ride.in_child:
                ride.out_of_child(End("succeeded", "length"))
        return steps

    def renew(self, faults: tuple[str, ...] = ()) -> None:
        riders = [ride.rider for ride in self.slots.rides]
        if not riders:
            return
        self.ledger.faults.extend(faults)
        try:
            answers = self.ledger.run(self.ledger.calls.renew(riders))
        except RedisError:
            return
        finally:
            self.ledger.faults.clear()
        for rider, answer in zip(riders, answers, strict=True):
            ride = self.slots.get(rider.id)
            if ride is not None and ride.rider == rider:
                self._publisher.renewed(ride, answer)

    def drain(self) -> None:
        """Hand back what rides, as at an orderly end."""
        try:
            for ride in self.slots.rides:
                if ride.state is RideState.CLAIMED:
                    self._publisher.hand_back(ride)
                elif ride.state is RideState.BOARDED:
                    ride.leave("")
                    self._send(Abort(ride.id))
        except RedisError:
            pass

    def heartbeat(self) -> None:
        state = "ready" if self.child is not None else "restarting"
        self.ledger.faults.clear()
        self.ledger.run(
            self.ledger.calls.heartbeat(
                self.incarnation,
                [POOL],
                10_000,
                {"state": state, "free": str(self.slots.num_free), "fingerprint": PRINT},
            )
        )

    def sign_off(self) -> None:
        """Its heartbeat has run out."""
        self.ledger.client.delete(keys.worker(self.incarnation))
        self.ledger.client.zrem(keys.pool_workers(POOL), self.incarnation)
