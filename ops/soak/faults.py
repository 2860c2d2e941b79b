"""The faults of a soak: kills, pauses, cut connections, lost and doubled messages, at random times, by kind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

import psutil
import redis.asyncio
from redis.exceptions import RedisError

from ops.instance import Role
from ops.private_instance import PrivateInstance
from ops.process import ProcessIdentity
from ops.soak.observations import Strike
from ops.soak.recovery import Recoveries, Riding, riding_jobs
from tasks import keys

#: How often each kind comes, against the others.
WEIGHTS: Final[dict[str, float]] = {
    "worker": 5,
    "model": 5,
    "api": 3,
    "redis": 3,
    "all": 1,
    "pause": 2,
    "terminate": 1,
    "freeze": 1,
    "connections": 3,
    "full memory": 1,
    "lost message": 2,
    "doubled message": 2,
}
#: Kinds that end a process with SIGKILL.
KILLS: Final = frozenset({"worker", "model", "api", "redis", "all"})
_ROLES: Final[tuple[Role, ...]] = ("worker", "model-worker", "api", "redis")
_PAUSED: Final[tuple[Role, ...]] = ("worker", "worker", "model-worker", "api")
#: What a dead process sent last is in the ledger by then.
_LAST_WORDS_S: Final = 0.1
#: Messages lie in the broker only while no worker has a free slot.
_MESSAGE_S: Final = 1.0
_MESSAGE_POLL_S: Final = 0.01
_FULL_S: Final = 3.0


class Faults:
    """Injects faults until it is cancelled; then `heal` makes sure that nothing stays stopped.

    Args:
        pool: whose messages are lost and doubled.
        gap_s: seconds between two faults, on average.
        lease_s, redis_timeout_s: a paused process outlasts its lease; a frozen Redis the longest wait for an answer.

    Attributes:
        strikes: what was done.
        num_killed: processes that got SIGKILL, by role.
    """

    def __init__(
        self,
        instance: PrivateInstance,
        client: redis.asyncio.Redis,
        recoveries: Recoveries,
        draw: random.Random,
        *,
        pool: str,
        gap_s: float,
        lease_s: float,
        redis_timeout_s: float,
        weights: dict[str, float],
    ) -> None:
        self.strikes: list[Strike] = []
        self.num_killed: dict[str, int] = dict.fromkeys(_ROLES, 0)
        self._instance = instance
        self._client = client
        self._recoveries = recoveries
        self._draw = draw
        self._queue = keys.queue(pool)
        self._gap_s = gap_s
        self._pause_s = 2 * lease_s
        self._freeze_s = 1.5 * redis_timeout_s
        self._weights = weights
        self._stopped: set[ProcessIdentity] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._by_kind: dict[str, Callable[[], Awaitable[str]]] = {
            "worker": lambda: self._kill_one("worker"),
            "model": lambda: self._kill_one("model-worker"),
            "api": lambda: self._kill_one("api"),
            "redis": lambda: self._kill_one("redis"),
            "all": self._kill_all,
            "pause": lambda: self._stop_one(self._draw.choice(_PAUSED), self._pause_s),
            "terminate": self._terminate_one,
            "freeze": lambda: self._stop_one("redis", self._freeze_s),
            "connections": self._kill_connections,
            "full memory": self._fill_memory,
            "lost message": self._lose_messages,
            "doubled message": self._double_messages,
        }

    async def run(self) -> None:
        """Inject faults for ever."""
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._gap_s))
            (kind,) = self._draw.choices(list(self._weights), list(self._weights.values()))
            await self.strike(kind)

    async def strike(self, kind: str) -> bool:
        """Inject one fault now. False where there is nobody that it could meet."""
        before = await self._riding()
        at, since = time.time(), time.monotonic()
        try:
            what = await self._by_kind[kind]()
        except (RedisError, OSError) as error:
            what = f"not heard: {error}" if kind == "connections" else ""
        if not what:
            return False
        self.strikes.append(Strike(kind, at, since, what))
        await asyncio.sleep(_LAST_WORDS_S)
        after = {job.id: job for job in await self._riding()} if kind in ("worker", "model", "pause") else {}
        met = [after.get(job.id, job) for job in before if self._meets(kind, what, job)]
        self._recoveries.watch(kind, since, met)
        return True

    async def heal(self) -> None:
        """Let everything that is stopped go on, at once."""
        endings = tuple(self._endings)
        for task in endings:
            task.cancel()
        await asyncio.gather(*endings, return_exceptions=True)
        for identity in tuple(self._stopped):
            self._resume(identity)

    async def _riding(self) -> list[Riding]:
        with suppress(RedisError, OSError):
            return await riding_jobs(self._client)
        return []

    def _meets(self, kind: str, what: str, job: Riding) -> bool:
        """Whether a fault touches a job: everything that concerns Redis does, a worker's only those who ride there."""
        if kind in ("worker", "model", "pause"):
            return job.incarnation in what
        return kind in ("redis", "all", "freeze", "connections")

    # --- kinds ------------------------------------------------------------------------------------------------------

    async def _kill_one(self, role: Role) -> str:
        found = [identity for identity in self._instance.processes(role) if identity not in self._stopped]
        if not found:
            return ""
        identity = self._draw.choice(found)
        rider_of = await self._incarnation_of(role, identity)
        return f"{role} {identity.pid} {rider_of}".rstrip() if self._signal(role, identity) else ""

    async def _terminate_one(self) -> str:
        """As in a rolling restart: the worker drains and hands back, and the supervisor starts it again."""
        found = [identity for identity in self._instance.processes("worker") if identity not in self._stopped]
        process = self._draw.choice(found).process() if found else None
        if process is None:
            return ""
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        return f"worker {process.pid}"

    async def _kill_all(self) -> str:
        found = [(role, identity) for role in _ROLES for identity in self._instance.processes(role)]
        return ", ".join(f"{role} {identity.pid}" for role, identity in found if self._signal(role, identity))

    async def _stop_one(self, role: Role, seconds: float) -> str:
        found = [identity for identity in self._instance.processes(role) if identity not in self._stopped]
        if not found:
            return ""
        identity = self._draw.choice(found)
        rider_of = await self._incarnation_of(role, identity)
        process = identity.process()
        if process is None:
            return ""
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
        self._stopped.add(identity)
        self._later(self._resume_later(identity, seconds))
        return f"{role} {identity.pid} for {seconds:g} s {rider_of}".rstrip()

    async def _kill_connections(self) -> str:
        killed = 0
        for kind in ("normal", "pubsub"):
            killed += int(await self._client.client_kill_filter(_type=kind, skipme=True))
        return f"{killed} connections"

    async def _fill_memory(self) -> str:
        await self._client.config_set("maxmemory", 1)
        self._later(self._empty_memory())
        return f"for {_FULL_S:g} s"

    async def _empty_memory(self) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(_FULL_S)
        with suppress(RedisError, OSError):  # a server that was killed meanwhile has forgotten it
            await self._client.config_set("maxmemory", 0)

    async def _lose_messages(self) -> str:
        until = time.monotonic() + _MESSAGE_S
        while time.monotonic() < until:
            length = int(await self._client.llen(self._queue))
            if length and await self._client.delete(self._queue):
                return f"{length} messages"
            await asyncio.sleep(_MESSAGE_POLL_S)
        return ""

    async def _double_messages(self) -> str:
        waiting = [str(message) for message in await self._client.lrange(self._queue, 0, -1)]
        # kombu keeps [message, exchange, routing key] of what is not acknowledged
        taken = [json.dumps(json.loads(str(kept))[0]) for kept in await self._client.hvals(keys.UNACKED)]
        copies = waiting + taken
        if copies:
            await self._client.rpush(self._queue, *copies)
        return f"{len(copies)} messages" if copies else ""

    # --- signals ----------------------------------------------------------------------------------------------------

    def _signal(self, role: Role, identity: ProcessIdentity) -> bool:
        process = identity.process()
        if process is None:
            return False
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
        self.num_killed[role] += 1
        return True

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _resume_later(self, identity: ProcessIdentity, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._resume(identity)

    def _resume(self, identity: ProcessIdentity) -> None:
        self._stopped.discard(identity)
        process = identity.process()
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    async def _incarnation_of(self, role: Role, identity: ProcessIdentity) -> str:
        """The worker incarnation that a worker's or model process belongs to, as its heartbeat says; "" if unknown."""
        field = {"worker": "pid", "model-worker": "child_pid"}.get(role)
        if field is None:
            return ""
        with suppress(RedisError, OSError):
            async for name in self._client.scan_iter(keys.worker("*"), count=1000):
                if str(await self._client.hget(name, field)) == str(identity.pid):
                    return str(name).removeprefix(keys.worker(""))
        return ""


def count_by_kind(strikes: Sequence[Strike]) -> dict[str, int]:
    """How often each kind came; kinds that never came are there with 0."""
    counted = dict.fromkeys(WEIGHTS, 0)
    for strike in strikes:
        counted[strike.kind] = counted.get(strike.kind, 0) + 1
    return counted
