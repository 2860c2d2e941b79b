"""The ledger's very scripts on a real server, under a clock that only the test moves.

Leases, grace and deadlines then take no time, and a run repeats itself exactly. The keys' own expiry stays on the
server's clock: tests of it use short retentions and no clock.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import redis

from tasks import entries, keys
from tasks.batch_calls import BatchCalls
from tasks.calls import Call
from tasks.entries import Entry, decode
from tasks.ledger import SyncLedger, script_text
from tasks.ledger_types import Acceptance, Accepted, Claim, Invitation, Job, Reaped, Rider, SlotAnswer, SlotWrite
from tasks.settings import Settings

T = TypeVar("T")
POOL = "m"
PRINT = "fp"


def token(n: int) -> int:
    """Id of a test job's token number n."""
    return 100 + n


def word(n: int) -> str:
    """Text of a test job's token number n."""
    return f"t{n} "


def write(rider: Rider, first: int, count: int = 1, **more: Any) -> SlotWrite:
    """The write of `count` tokens from number `first` on."""
    numbers = range(first, first + count)
    return SlotWrite(
        rider.id, rider.epoch, rider.nonce, first, tuple(map(token, numbers)), tuple(map(word, numbers)), **more
    )


@dataclass(frozen=True, slots=True)
class ChangedScripts:
    """Scripts that differ from the product's: what mutation tests run."""

    sources: Mapping[str, str]

    def text(self, name: str) -> str:
        return self.sources.get(name) or script_text(name)


class LedgerOnAClock(SyncLedger):
    """Runs calls at `now_ms`, which moves by 1 ms with each call, and otherwise only when the test says so.

    Args:
        changed: other sources of scripts, for mutation tests.
        real_time: leave the clock to the server.

    Attributes:
        version: of the ledger that the calling process reads and writes at best; tests raise it.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        changed: ChangedScripts | None = None,
        *,
        real_time: bool = False,
    ) -> None:
        super().__init__(client, settings)
        self.settings = settings
        self.batch_calls = BatchCalls(settings)
        self.version = entries.VERSION
        self.now_ms = int(time.time() * 1000)
        self.changed = changed or ChangedScripts({})
        self._real_time = real_time
        self._loaded: dict[str, str] = {}
        self._nonces = itertools.count(1)

    def run(self, call: Call[T]) -> T:
        self.now_ms += 1
        if call.script not in self._loaded:
            self._loaded[call.script] = str(self.client.script_load(self.changed.text(call.script)))
        args = call.args
        if not self._real_time:
            config = {**json.loads(str(args[0])), "clock": self.now_ms, "version": self.version}
            args = (json.dumps(config), *args[1:])
        return call.parse(self.client.evalsha(self._loaded[call.script], len(call.keys), *call.keys, *args))

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)

    # --- shorthand --------------------------------------------------------------------------------------------------

    def accept(self, id: str = "j", **more: Any) -> Accepted:
        return self.run(self.calls.accept(acceptance(id, **more)))

    def accept_group(self, id: str = "g", n: int = 2, **more: Any) -> Accepted:
        return self.accept(id, jobs=[Job(i, '{"prompt": "x"}') for i in range(n)], is_group=True, **more)

    def try_claim(
        self, id: str = "j", nonce: str = "", fingerprint: str = PRINT, worker: str = "w1", board: bool = False
    ) -> tuple[Claim, str]:
        nonce = nonce or f"nonce{next(self._nonces)}"
        return self.run(self.calls.claim(id, nonce, fingerprint, worker, worker, 1, board=board)), nonce

    def claim(self, id: str = "j", **more: Any) -> Rider:
        """Claim a job that is there to be claimed."""
        claim, nonce = self.try_claim(id, **more)
        assert claim.verdict == "ok", claim
        return Rider(id, claim.epoch, nonce)

    def board(self, rider: Rider) -> SlotAnswer:
        return self.step(SlotWrite(rider.id, rider.epoch, rider.nonce, self.k(rider.id) + 1, board=True))

    def ride(self, id: str = "j", tokens: int = 0, **more: Any) -> Rider:
        """Accept, claim and board a job, and write its first tokens."""
        self.accept(id)
        rider = self.claim(id, **more)
        self.board(rider)
        if tokens:
            self.step(write(rider, 1, tokens))
        return rider

    def step(self, one: SlotWrite) -> SlotAnswer:
        (answer,) = self.run(self.calls.step([one]))
        return answer

    def finish(self, rider: Rider, status: str = "succeeded", **more: Any) -> SlotAnswer:
        first = self.k(rider.id) + 1
        return self.step(
            SlotWrite(rider.id, rider.epoch, rider.nonce, first, final=status, finish_reason="stop", **more)
        )

    def renew(self, rider: Rider) -> SlotAnswer:
        (answer,) = self.run(self.calls.renew([rider]))
        return answer

    def heartbeat(
        self, worker: str = "w1", free: int = 4, state: str = "ready", fingerprint: str = PRINT, pool: str = POOL
    ) -> bool:
        """A worker that counts as alive until `forget_worker`, however far the clock moves on."""
        fields = {"state": state, "free": str(free), "fingerprint": fingerprint}
        return self.run(self.calls.heartbeat(worker, [pool], 10**8, fields))

    def forget_worker(self, worker: str = "w1") -> None:
        self.client.delete(keys.worker(worker))
        self.client.zrem(keys.pool_workers(POOL), worker)

    def reap(self) -> Reaped:
        return self.run(self.calls.reap())

    def pump(self) -> list[Invitation]:
        return self.run(self.calls.pump(POOL))

    def pass_grace(self) -> None:
        """Two looks of the reaper with the grace of the first between them, which start by finding an outage."""
        self.reap()
        self.advance(self.settings.grace_s)
        self.keep_ticking(0)

    def keep_ticking(self, seconds: float) -> list[Invitation]:
        """Let time pass as it does while a keeper lives; returns what it invited. The tick never looks stale."""
        invited: list[Invitation] = []
        until = self.now_ms + round(seconds * 1000)
        while True:
            reaped = self.reap()
            invited.extend(reaped.invitations)
            if self.now_ms >= until:
                return invited
            self.now_ms = min(until, self.now_ms + 1000)

    def let_lease_run_out(self, rider: Rider) -> list[Invitation]:
        """The owner falls silent until its lease has run out, while the reaper ticks on."""
        self.client.set(keys.TICK, self.now_ms)
        self.client.delete(keys.GRACE)
        return self.keep_ticking((int(self.field(rider.id, "lease")) - self.now_ms) / 1000 + 0.01)

    # --- what Redis holds -------------------------------------------------------------------------------------------

    def record(self, id: str) -> dict[str, str]:
        return self.client.hgetall(keys.record(id))  # type: ignore[return-value]

    def field(self, id: str, name: str) -> str:
        return str(self.client.hget(keys.record(id), name) or "")

    def status(self, id: str) -> str:
        return self.field(id, "status")

    def k(self, id: str) -> int:
        return int(self.field(id, "k") or 0)

    def raw_log(self, id: str) -> list[tuple[str, dict[str, str]]]:
        return self.client.xrange(keys.log(id))  # type: ignore[return-value]

    def log(self, id: str) -> list[Entry]:
        return [decode(fields["d"]) for _, fields in self.raw_log(id)]

    def due(self, id: str) -> float | None:
        score = self.client.zscore(keys.DUE, id)
        return None if score is None else float(str(score))

    def ends(self, id: str) -> list[Entry]:
        return [entry for entry in self.log(id) if entry.kind == "end"]

    def view(self, id: str) -> dict[str, Any]:
        (view,) = self.run(self.calls.view([id]))
        assert view is not None
        return view

    def celery_record(self, id: str) -> dict[str, Any]:
        raw = self.client.get(f"celery-task-meta-{id}")
        return json.loads(str(raw)) if raw else {}

    def dump(self) -> dict[str, Any]:
        """Everything in the database but the reaper's own marks, to see that nothing changed."""
        found: dict[str, Any] = {}
        for key in sorted(str(key) for key in self.client.scan_iter()):
            if key not in (keys.TICK, keys.GRACE):
                found[key] = (_value(self.client, key), _expires(self.client, key))
        return found


def _expires(client: redis.Redis, key: str) -> int:
    return int(str(client.pexpiretime(key)))


def _value(client: redis.Redis, key: str) -> object:
    match str(client.type(key)):
        case "hash":
            return client.hgetall(key)
        case "zset":
            return client.zrange(key, 0, -1, withscores=True)
        case "stream":
            return client.xrange(key)
        case "list":
            return client.lrange(key, 0, -1)
        case _:
            return client.get(key)


Snapshot = list[tuple[bytes, bytes, int]]


def snapshot(client: redis.Redis) -> Snapshot:
    """What is in the database now, as its append-only file would hold it."""
    with _of_bytes(client) as raw:
        held = [(key, raw.dump(key), int(str(raw.pexpiretime(key)))) for key in raw.scan_iter()]
    return [(key, value, max(0, expires)) for key, value, expires in held if value is not None]


def restore(client: redis.Redis, held: Snapshot) -> None:
    """The server has died, and comes back without what it wrote since."""
    with _of_bytes(client) as raw:
        raw.flushdb()
        for key, value, expires in held:
            raw.restore(key, expires, value, absttl=expires > 0)


def _of_bytes(client: redis.Redis) -> redis.Redis:
    server = client.connection_pool.connection_kwargs
    return redis.Redis(host=server["host"], port=server["port"], socket_timeout=5)


def acceptance(id: str, **more: Any) -> Acceptance:
    base = Acceptance(id, POOL, '{"max_tokens": 8}', [Job(7, '{"prompt": "x"}')], deadline_s=3600, max_tokens=8)
    return replace(base, **more)


@contextlib.contextmanager
def listening(client: redis.Redis, channel: str) -> Iterator[Callable[[], str]]:
    """Subscribed to a channel; gives a function that returns its next message, "" after a while without one."""
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
        pubsub.subscribe(channel)
        pubsub.get_message(timeout=5)

        def next_message() -> str:
            message = pubsub.get_message(timeout=5)
            return str(message["data"]) if message else ""

        yield next_message


def well_formed(entries: Sequence[Entry]) -> None:
    """Each index once and in order, and nothing after the one end."""
    have = 0
    for position, entry in enumerate(entries):
        if entry.kind == "tokens":
            assert entry.first == have + 1, f"token {entry.first} after {have}"
            have = entry.n
        assert entry.n == have
        assert entry.kind != "end" or position == len(entries) - 1, "an entry after the end"
