"""The running batches as they are now, for people and programs that look on (`GET /service`)."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.caller import Caller
from api.models import Models, Pool
from tasks.ledger import AsyncLedger
from tasks.onlook_calls import OnlookCalls, PoolOnlook, RidingJob
from tasks.registry import HEARTBEATS_MISSED, WorkerInfo
from tasks.settings import Settings

#: All who look on within this time are told the same: however many they are, Redis is asked twice a second.
FRESH_S: Final = 0.5
#: Names riders without telling their ids; each process draws its own.
_TAG_KEY: Final = secrets.token_bytes(16)
#: A worker that was not heard for so many heartbeats is told to be silent.
_SILENT_BEATS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What is seen at one moment. `pools` and `looks` belong together, one by one."""

    pools: Sequence[Pool]
    looks: Sequence[PoolOnlook]
    riders: Sequence[RidingJob]


class Onlook:
    """Looks at Redis for all who look on: at most twice a second, and not at all while nobody does."""

    def __init__(self, ledger: AsyncLedger, models: Models, settings: Settings) -> None:
        self._ledger = ledger
        self._calls = OnlookCalls(settings)
        self._models = models
        self._ttl_ms = round(HEARTBEATS_MISSED * settings.heartbeat_s * 1000)
        self._silent_ms = round(_SILENT_BEATS * settings.heartbeat_s * 1000)
        self._looking: asyncio.Task[Scene] | None = None
        self._looked_at = -FRESH_S

    async def describe(self, caller: Caller) -> list[dict[str, Any]]:
        """Every model that has workers, riders or jobs that wait, and is the caller's to use.

        Raises:
            RedisError: Redis does not answer.
        """
        scene = await self._scene()
        allowed = self._models.allowed(caller)
        return [
            self._model(pool, look, [rider for rider in scene.riders if rider.pool == pool.alias], caller.owner)
            for pool, look in zip(scene.pools, scene.looks, strict=True)
            if allowed is None or pool.alias in allowed
        ]

    async def _scene(self) -> Scene:
        now = asyncio.get_running_loop().time()
        if self._looking is None or (self._looking.done() and now - self._looked_at >= FRESH_S):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look())
        # who leaves does not take the answer away from the others
        return await asyncio.shield(self._looking)

    async def _look(self) -> Scene:
        workers = await self._models.workers(fresh=True)
        aliases = sorted({*await self._models.known(), *(worker.pool for worker in workers)})
        riders, looks = await self._ledger.run(self._calls.onlook(aliases))
        riding = {rider.pool for rider in riders}
        seen = [
            (Pool(alias, [worker for worker in workers if worker.pool == alias], look.waiting), look)
            for alias, look in zip(aliases, looks, strict=True)
        ]
        seen = [(pool, look) for pool, look in seen if pool.workers or pool.waiting or pool.alias in riding]
        return Scene([pool for pool, _ in seen], [look for _, look in seen], riders)

    def _model(self, pool: Pool, look: PoolOnlook, riders: Sequence[RidingJob], owner: str) -> dict[str, Any]:
        living = {worker.incarnation for worker in pool.workers}
        return {
            "model": pool.alias,
            "state": pool.state,
            "workers": [
                self._worker(
                    worker, look, [rider for rider in riders if rider.incarnation == worker.incarnation], owner
                )
                for worker in pool.workers
            ],
            "stranded": [_rider(rider, owner) for rider in riders if rider.incarnation not in living],
            "waiting": look.waiting,
            "queue": [id if whose == owner else None for id, whose in look.first],
        }

    def _worker(self, worker: WorkerInfo, look: PoolOnlook, riders: Sequence[RidingJob], owner: str) -> dict[str, Any]:
        silent_ms = self._ttl_ms - look.heard_ms.get(worker.incarnation, 0)
        return {
            # neither host nor process: who looks on need not know the machines
            "id": worker.incarnation[:12],
            "name": worker.name,
            "state": "silent" if silent_ms > self._silent_ms else worker.state,
            "phase": worker.phase,
            "progress": worker.progress,
            "engine": worker.engine,
            "device": worker.device,
            "slots": worker.slots,
            "tokens_per_s": worker.tokens_per_s,
            "version": worker.version,
            "riders": [_rider(rider, owner) for rider in riders],
        }


def _rider(rider: RidingJob, owner: str) -> dict[str, Any]:
    return {
        "tag": hashlib.blake2b(rider.id.encode(), digest_size=6, key=_TAG_KEY).hexdigest(),
        "id": rider.id if rider.owner == owner else None,
        "tokens": rider.tokens,
        "max_tokens": rider.max_tokens or None,
        "stalled": rider.lease_ms < 0,
        "stopping": rider.stops,
    }
