"""Who waits for which job, told to all replicas by entries that run out unless they are renewed.

A synchronous request or a POSTed stream whose client leaves cancels its job, unless somebody else waits for it. Only
those who came later have to be noted: the one who posted is the only one whose leaving cancels.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

from redis.exceptions import RedisError

from api.ending import end_tasks
from tasks.ledger import AsyncLedger

#: An entry outlives a replica that died by so much at most.
LEASE_S: Final = 30.0
_PAGE: Final = 200


def root_of(id: str) -> str:
    """The job that is cancelled as one: the group of a child, else the job itself."""
    head, dot, tail = id.rpartition(".")
    return head if dot and tail.isdecimal() else id


class Attachments:
    """The attachments that this process holds."""

    def __init__(self, ledger: AsyncLedger) -> None:
        self._ledger = ledger
        self._held: dict[str, str] = {}
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew(), name="carpool-attachments")

    async def close(self) -> None:
        """Stop renewing: what is held runs out by itself."""
        if self._renewing is not None:
            await end_tasks([self._renewing])

    async def attach(self, id: str) -> str:
        """Note that somebody waits for this job or group, until `detach` is called with the answer."""
        member = uuid.uuid4().hex
        self._held[member] = root_of(id)
        try:
            await self._ledger.run(self._ledger.calls.attach(round(LEASE_S * 1000), [(root_of(id), member)]))
        except BaseException:
            del self._held[member]
            raise
        return member

    async def detach(self, member: str) -> None:
        """Somebody no longer waits."""
        id = self._held.pop(member)
        await self._ledger.run(self._ledger.calls.detach(id, member))

    async def num_others(self, id: str) -> int:
        """How many wait for a job, on all replicas."""
        return await self._ledger.run(self._ledger.calls.detach(root_of(id)))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            waiting = [(id, member) for member, id in self._held.items()]
            try:
                for start in range(0, len(waiting), _PAGE):
                    page = waiting[start : start + _PAGE]
                    await self._ledger.run(self._ledger.calls.attach(round(LEASE_S * 1000), page))
            except RedisError:
                continue  # two more tries fit into the lease
