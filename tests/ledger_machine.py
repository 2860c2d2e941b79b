"""A world around the ledger's very scripts, on a real server: two workers, a broker, a keeper, two workers that deliver
webhooks, and all that breaks.

After every call of a script the world looks at all that Redis holds and says what must be true there. The actions are
chosen by Hypothesis (tests/test_ledger_machine.py) or by a seeded walk (tests/ledger_walk.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from tasks import keys
from tasks.calls import Call
from tasks.entries import decode
from tasks.metric_calls import MetricCalls
from tasks.settings import Settings
from tests.ledger_counts import check_counts
from tests.ledger_deliverers import LEASE_S, Deliverer, Told
from tests.ledger_harness import (
    POOL,
    ChangedScripts,
    LedgerOnAClock,
    Snapshot,
    restore,
    snapshot,
    token,
    well_formed,
    word,
)
from tests.ledger_metrics import check_counted_once, check_gauges
from tests.ledger_workers import SLOTS, Script, SimulatedWorker

T = TypeVar("T")
#: So many jobs may wait: one less than there are.
MOST_WAITING = 4
SETTINGS = Settings(retention_s=3600, idempotency_s=3600, max_deaths=6, max_claims=8, max_queued_jobs=MOST_WAITING)
#: One job kills its process at token 4; the others are innocent.
SCRIPTS = {"a": Script(10), "b": Script(3), "c": Script(7), "d": Script(12), "poison": Script(8, poison_at=4)}
JOBS = tuple(SCRIPTS)
#: These have a webhook.
TOLD = ("a", "c", "poison")
URL = "https://example.com/hook"
#: The API keys that they are made with; "all" is made without one.
OWNERS = {"a": "key_x", "b": "key_x", "c": "key_y", "d": keys.NO_KEY, "poison": "key_y"}
KEYS = ("key_x", "key_y")
DEADLINE_S = 7200
SHARED = (
    *(keys.DUE, keys.TICK, keys.GRACE, keys.POOLS, keys.SEEN, keys.GENERATED, keys.HOOKS, keys.HOOK_WORKERS),
    *(
        key(POOL)
        for key in (
            keys.wait,
            keys.invited,
            keys.queued,
            keys.load,
            keys.shares,
            keys.use,
            keys.lost,
            keys.rate,
            keys.counted,
        )
    ),
    *(key for owner in (*KEYS, keys.NO_KEY) for key in (keys.jobs(owner), keys.own(POOL, owner))),
    *(keys.live(owner) for owner in KEYS),
)
ENDED = ("succeeded", "failed", "cancelled", "expired")
CELERY_STATES = {"succeeded": "SUCCESS", "failed": "FAILURE", "cancelled": "REVOKED", "expired": "FAILURE"}


@dataclass(slots=True)
class Seen:
    """What was seen of a job after the last call, and what the world knows of it."""

    record: dict[str, str] = field(default_factory=dict)
    accepted: bool = False
    wanted_stop: bool = False
    deaths: int = 0


class WatchedLedger(LedgerOnAClock):
    """Tells the world before and after each call."""

    def __init__(self, client: redis.Redis, changed: ChangedScripts | None, after: Callable[[], None]) -> None:
        super().__init__(client, SETTINGS, changed)
        self._after = after

    def run(self, call: Call[T]) -> T:
        answer = super().run(call)
        self._after()
        return answer


class World:
    """Jobs, workers, broker and keeper. Every method but `check` and `finish` is one thing that can happen."""

    def __init__(self, client: redis.Redis, changed: ChangedScripts | None = None) -> None:
        client.flushdb()
        self.client = client
        self.ledger = WatchedLedger(client, changed, self.check)
        self.metric_calls = MetricCalls(SETTINGS)
        self.seen = {id: Seen() for id in JOBS}
        self.workers = [self._new_worker(i) for i in range(2)]
        self.told = Told()
        self.deliverers = [Deliverer(self.ledger, self.told) for _ in range(2)]
        self._tags = itertools.count(1)
        self._lost: list[tuple[str, str]] = []
        self._snapshot: tuple[Snapshot, dict[str, bool]] | None = None
        self._ticked_ms = self._grace_ms = 0
        for worker in self.workers:
            worker.heartbeat()
        self.tick()

    def _new_worker(self, i: int) -> SimulatedWorker:
        return SimulatedWorker(f"w{i}", self.ledger, SCRIPTS, self.pump)

    # --- clients ----------------------------------------------------------------------------------------------------

    def accept(self, id: str, twice: bool = False) -> None:
        for _ in range(1 + twice):
            is_full = self._num_waiting() >= MOST_WAITING
            was_accepted = self.seen[id].accepted
            self.seen[id].accepted = was_accepted or not is_full
            webhook = URL if id in TOLD else ""
            verdict = self.ledger.accept(id, deadline_s=DEADLINE_S, webhook=webhook, owner=OWNERS[id]).verdict
            assert verdict == ("again" if was_accepted else "full_jobs" if is_full else "ok")
            self.check()
        self.pump()

    def _num_waiting(self) -> int:
        """Jobs that wait, and those of which the keeper knows that their worker is gone."""
        lost = self.client.zcount(keys.lost(POOL), self.ledger.now_ms + 1, "+inf")
        return int(str(self.client.zcard(keys.wait(POOL)))) + int(str(lost))

    def cancel(self, id: str) -> None:
        if self.seen[id].accepted:
            self.seen[id].wanted_stop = True
            self.ledger.run(self.ledger.calls.cancel(id))

    # --- keeper and broker ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        for invitation in self.ledger.pump():
            self._send(invitation.id)

    def tick(self) -> None:
        if self.ledger.now_ms - self._ticked_ms > 3000:
            self._grace_ms = self.ledger.now_ms + round(SETTINGS.grace_s * 1000)
        self._ticked_ms = self.ledger.now_ms
        for invitation in self.ledger.reap().invitations:
            self._send(invitation.id)
        self.pump()
        self.ledger.run(self.metric_calls.tally())
        gauges = self.ledger.run(self.metric_calls.gauges())
        check_gauges(gauges, [seen.record for seen in self.seen.values()], self.ledger.now_ms)

    def _send(self, id: str) -> None:
        self.client.rpush(keys.queue(POOL), f"{id} {next(self._tags)}")

    def fetch(self, i: int) -> None:
        worker = self.workers[i]
        if worker.paused or not worker.may_fetch:
            return
        message = self.client.lpop(keys.queue(POOL))
        if message:
            id, tag = str(message).split()
            worker.offer(id, tag)

    def lose_message(self) -> None:
        self.client.lpop(keys.queue(POOL))

    def double_message(self) -> None:
        message = self.client.lindex(keys.queue(POOL), 0)
        if message:
            self._send(str(message).split()[0])

    def reconnect(self, i: int) -> None:
        """The broker delivers again what this worker has not acknowledged."""
        if not self.workers[i].paused:
            for tag, delivery in list(self.workers[i].celery.unacked.items()):
                self.workers[i].offer(delivery.id, tag)

    # --- workers ----------------------------------------------------------------------------------------------------

    def turn(self, i: int) -> None:
        worker = self.workers[i]
        had = worker.child
        worker.turn()
        if had and not worker.child:
            self._count_deaths(worker)

    def settle(self, i: int, faults: tuple[str, ...] = ()) -> None:
        if not self.workers[i].paused:
            self.workers[i].settle(faults)

    def renew(self, i: int, faults: tuple[str, ...] = ()) -> None:
        if not self.workers[i].paused:
            self.workers[i].renew(faults)

    def heartbeat(self, i: int) -> None:
        if not self.workers[i].paused:
            self.workers[i].heartbeat()

    def drain(self, i: int) -> None:
        if not self.workers[i].paused:
            self.workers[i].drain()

    def pause(self, i: int) -> None:
        self.workers[i].paused = True
        self.workers[i].sign_off()

    def resume(self, i: int) -> None:
        self.workers[i].paused = False

    def stall(self, i: int, seconds: int) -> None:
        """A worker sleeps; when it wakes up it does not know that time has passed."""
        self.pause(i)
        self.advance(seconds)

    def child_dies(self, i: int) -> None:
        if self.workers[i].child is not None and not self.workers[i].paused:
            self.workers[i].child_dies()
            self._count_deaths(self.workers[i])

    def child_starts(self, i: int) -> None:
        self.workers[i].child_starts()

    def worker_dies(self, i: int) -> None:
        worker = self.workers[i]
        worker.sign_off()
        self._count_deaths(worker)
        self._lost.extend((delivery.id, tag) for tag, delivery in worker.celery.unacked.items())
        self.workers[i] = self._new_worker(i)

    def visibility_runs_out(self) -> None:
        """The broker delivers again what a dead worker had fetched."""
        for id, tag in self._lost:
            self.client.rpush(keys.queue(POOL), f"{id} {tag}")
        self._lost.clear()

    def _count_deaths(self, worker: SimulatedWorker) -> None:
        for ride in worker.slots.rides:
            self.seen[ride.id].deaths += 1

    # --- webhooks ---------------------------------------------------------------------------------------------------

    def look_for_webhooks(self, i: int) -> None:
        if not self.deliverers[i].paused:
            self.deliverers[i].pump()

    def deliver(self, i: int, fails: bool = False, faults: tuple[str, ...] = ()) -> None:
        if not self.deliverers[i].paused:
            self.deliverers[i].turn(fails, faults)

    def deliverer_sleeps_or_wakes(self, i: int) -> None:
        self.deliverers[i].paused = not self.deliverers[i].paused

    def deliverer_dies(self, i: int) -> None:
        self.deliverers[i] = Deliverer(self.ledger, self.told)

    def lose_webhook_message(self) -> None:
        self.client.lpop(keys.WEBHOOK_QUEUE)

    def double_webhook_message(self) -> None:
        message = self.client.lindex(keys.WEBHOOK_QUEUE, 0)
        if message:
            self.client.lpush(keys.WEBHOOK_QUEUE, str(message))

    # --- time and Redis ---------------------------------------------------------------------------------------------

    def advance(self, seconds: int) -> None:
        """Time passes, and the keeper ticks."""
        for _ in range(seconds):
            self.ledger.advance(1)
            self.tick()

    def outage(self, seconds: int) -> None:
        """Time passes, and nobody reaches Redis."""
        self.ledger.advance(seconds)

    def take_snapshot(self) -> None:
        """What is in the append-only file now."""
        self._snapshot = snapshot(self.client), {id: seen.accepted for id, seen in self.seen.items()}

    def lose_tail(self) -> None:
        """Redis dies, and comes back without what it wrote since the snapshot."""
        if self._snapshot is None:
            return
        held, accepted = self._snapshot
        restore(self.client, held)
        for id, seen in self.seen.items():
            seen.accepted = accepted[id]
            seen.record = self.ledger.record(id)
        self._ticked_ms, self._grace_ms = int(str(self.client.get(keys.TICK) or 0)), 0
        self.check()

    # --- what must be true ------------------------------------------------------------------------------------------

    def check(self) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for id in JOBS:
                pipeline.hgetall(keys.record(id))
                pipeline.xrange(keys.log(id))
                pipeline.get(keys.text(id))
                pipeline.zscore(keys.DUE, id)
                pipeline.zscore(keys.wait(POOL), id)
                pipeline.zscore(keys.invited(POOL), id)
                pipeline.get(f"celery-task-meta-{id}")
                pipeline.zscore(keys.HOOKS, id)
                for key in (keys.record(id), keys.log(id), keys.text(id), f"celery-task-meta-{id}"):
                    pipeline.pexpiretime(key)
            for key in SHARED:
                pipeline.pexpiretime(key)
            for owner in KEYS:
                pipeline.zrange(keys.live(owner), 0, -1)
            found: list[Any] = pipeline.execute()
        live = dict(zip(KEYS, found[-len(KEYS) :], strict=True))
        found = found[: -len(KEYS)]
        size = 12
        for i, id in enumerate(JOBS):
            self._check_job(id, *found[i * size : (i + 1) * size])
        assert all(expires != -1 for expires in found[len(JOBS) * size :]), "a shared key without an expiry"
        for owner, ids in live.items():
            going = {
                id
                for id, seen in self.seen.items()
                if seen.record and seen.record["status"] not in ENDED and OWNERS[id] == owner
            }
            assert set(ids) == going, "a key has at once what has not ended"
        check_counts(self.client, POOL)
        check_counted_once(self.client, POOL, [seen.record for seen in self.seen.values()])
        for worker in self.workers:
            assert len(worker.slots) <= SLOTS

    def _check_job(
        self,
        id: str,
        record: dict[str, str],
        raw_log: list[tuple[str, dict[str, str]]],
        text: str | None,
        due: float | None,
        waits: float | None,
        invited: float | None,
        celery: str | None,
        outbox: float | None,
        *expiries: int,
    ) -> None:
        seen = self.seen[id]
        if not record:
            assert not seen.accepted, "accepted means recorded"
            assert not raw_log
            return
        status, k = record["status"], int(record["k"])
        log = [decode(fields["d"]) for _, fields in raw_log]
        well_formed(log)
        assert [one for entry in log for one in entry.ids] == [token(n) for n in range(1, k + 1)]
        assert text == "".join(word(n) for n in range(1, k + 1)), "the text is the fold of the log"
        is_over = status in ENDED
        assert [entry.kind for entry in log].count("end") == is_over, "one end, where it has ended"
        if is_over:
            assert log[-1].kind == "end"
            assert log[-1].status == status
            assert celery is not None
            assert f'"status":"{CELERY_STATES[status]}"' in celery
        assert (due is None) == is_over, "due holds every live job"
        assert (waits is not None) == (status == "queued")
        assert status == "running" or record["owner"] == "" or is_over
        assert not (is_over and invited is not None)
        assert -1 not in expiries, "a key without an expiry"
        assert len({expires for expires in expiries if expires > 0}) == 1, "one expiry for all keys of a job"
        assert int(record["claims"]) <= SETTINGS.max_claims
        if not is_over:
            assert int(record["strikes"]) < SETTINGS.max_attempts
            assert int(record["deaths"]) < SETTINGS.max_deaths
        assert status != "cancelled" or seen.wanted_stop
        self._check_webhook(id, record, outbox, is_over)
        self._check_change(seen, record)
        seen.record = record

    def _check_webhook(self, id: str, record: dict[str, str], outbox: float | None, is_over: bool) -> None:
        state = record.get("hook", "")
        assert (outbox is not None) == (id in TOLD and state == ""), (
            "the outbox holds what is not delivered, and no more"
        )
        assert state in ("", "delivered")
        assert state == "" or is_over
        assert state == "" or self.told.knows(id), "delivered, and the receiver has not heard of it"
        if outbox is not None:
            assert outbox <= self.ledger.now_ms + 60_000, "nobody would look at it for long"

    def _check_change(self, seen: Seen, record: dict[str, str]) -> None:
        if not (before := seen.record):
            return
        if before["status"] in ENDED:
            assert (record["status"], record["epoch"], record["k"]) == (before["status"], before["epoch"], before["k"])
        assert int(record["k"]) >= int(before["k"])
        assert int(record["epoch"]) >= int(before["epoch"])
        assert before["stop"] in ("", record["stop"]), "the first stop wins"
        if before["status"] == "running" and record["owner"] not in ("", before["owner"]):
            assert int(before["lease"]) < self.ledger.now_ms, "one owner"
            self._check_grace()
        was_boarded = before["status"] == "running" and before["boarded"] != ""
        if was_boarded and record["status"] == "running" and record["owner"] != before["owner"]:
            seen.deaths += 1
            assert int(record["deaths"]) == int(before["deaths"]) + 1, "an owner that falls silent counts as a death"
        elif was_boarded and record["status"] == "failed" and int(before["lease"]) < self.ledger.now_ms:
            seen.deaths += 1  # the same, where the reaper or a claim has found one too many
        assert int(record["deaths"]) <= seen.deaths, "no death is charged twice"

    def _check_grace(self) -> None:
        assert self.ledger.now_ms - self._ticked_ms <= 3000, "nobody takes a leased job before the outage was seen"
        assert self.ledger.now_ms > self._grace_ms, "nobody takes a leased job in grace"

    # --- when faults stop -------------------------------------------------------------------------------------------

    def finish(self, most_s: int = 400) -> None:
        """Nothing breaks any more, but what the poison job breaks: every accepted job comes to its end."""
        for worker in self.workers:
            worker.paused = False
        for second in range(most_s):
            if all(seen.record.get("status", "") in ENDED for seen in self.seen.values() if seen.accepted):
                break
            for i in range(2):
                if second % 2 == 0:
                    self.heartbeat(i)
                self.child_starts(i)
                for _ in range(2):
                    self.fetch(i)
                self.renew(i)
                self.settle(i)
                self.turn(i)
                self.settle(i)
            self.advance(1)
        for id, seen in self.seen.items():
            if seen.accepted:
                assert seen.record["status"] in ENDED, f"{id} never ends: {seen.record}"
                self._check_end(id, seen)
        self._finish_webhooks()

    def _finish_webhooks(self) -> None:
        """Every end is told, within the time that a dead worker's attempt or a lost message takes."""
        wanted = [id for id in TOLD if self.seen[id].accepted]
        for deliverer in self.deliverers:
            deliverer.paused = False
        for _ in range(2 * LEASE_S):
            for i in range(2):
                self.look_for_webhooks(i)
                for _ in range(3):
                    self.deliver(i)
            self.advance(1)
        for id in wanted:
            assert self.ledger.field(id, "hook") == "delivered", f"the end of {id} is never told"

    def _check_end(self, id: str, seen: Seen) -> None:
        view, script = self.ledger.view(id), SCRIPTS[id]
        if view["status"] == "succeeded":
            assert (view["usage"]["completion_tokens"], script.poison_at) == (script.length, 0)
        elif view["status"] == "failed":
            assert view["error"]["code"] in ("worker_died", "claims_exhausted")
