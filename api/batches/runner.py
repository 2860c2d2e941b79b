"""Serves batches to their end: validates, feeds, drains. Every API process runs one of these.

A batch's lock saves work and nothing else: two that serve the same batch accept no job twice and write no answer twice,
since the scripts see to both (`tasks/lua/batch_feed.lua`, `tasks/lua/batch_drain.lua`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from functools import partial
from typing import Final, Self

import structlog
from fastapi import Request
from redis.exceptions import RedisError

from api.batches.answers import read_answers
from api.batches.envelope import Validation, errors_json, input_lost
from api.batches.feeder import Feeder
from api.batches.file_store import FileStore
from api.batches.lines import read_lines
from api.ending import end_tasks
from api.service import Service
from tasks import keys
from tasks.batch_calls import BatchCalls
from tasks.batch_types import BatchState, Position
from tasks.codes import CarpoolError
from tasks.redis_clients import write_even_when_full_async

_log = structlog.get_logger("carpool.batches")
#: How often is looked for batches that nobody serves.
_POLL_S: Final = 1.0
#: A server that died is followed by another after so long; each turn of a batch renews it.
_LOCK_MS: Final = 5000
#: A turn comes at least this often, also where nobody tells of an end.
_TURN_S: Final = 1.0
_PAUSE_S: Final = 0.05
#: So many batches at once, the oldest first; the others wait.
_MAX_SERVED: Final = 8
#: After an error of our own.
_BACKOFF_S: Final = 30.0


class BatchRunner:
    """Looks for batches that have not ended, and serves those that no other process does.

    Attributes:
        store: the files.
        calls: the ledger's calls for files and batches.
    """

    def __init__(self, service: Service) -> None:
        self.calls = BatchCalls(service.settings)
        self.store = FileStore(service.client, service.ledger, self.calls, service.settings)
        self._service = service
        self._feeder = Feeder(service, self.store)
        self._id = uuid.uuid4().hex
        self._wanted = asyncio.Event()
        self._served: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="carpool-batches")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await end_tasks([self._task])
        await end_tasks(list(self._served.values()))

    def wake(self) -> None:
        """There is a new batch."""
        self._wanted.set()

    async def _run(self) -> None:
        while not self._service.stopping.is_set():
            self._wanted.clear()
            try:
                live = await self._service.client.zrange(keys.BATCHES_LIVE, 0, -1)
                await self._serve_some([str(id) for id in live])
            except RedisError as error:
                _log.debug("batches_wait_for_redis", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._wanted.wait()

    async def _serve_some(self, live: list[str]) -> None:
        """Serve what no other process does, as far as there is room."""
        now = asyncio.get_running_loop().time()
        self._not_before = {id: at for id, at in self._not_before.items() if at > now}
        for id in live:
            if len(self._served) >= _MAX_SERVED:
                return
            if id in self._served or id in self._not_before or not await self._takes_lock(id):
                continue
            self._served[id] = task = asyncio.create_task(self._serve(id), name=f"carpool-{id}")
            task.add_done_callback(partial(self._ended, id))

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        del self._served[id]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._not_before[id] = asyncio.get_running_loop().time() + _BACKOFF_S
            _log.error("batch_cannot_be_served", batch=id, exc_info=error)

    async def _serve(self, id: str) -> None:
        try:
            with await self._service.relay.follow([id], ends_only=True) as feed:
                while not self._service.stopping.is_set() and await self._keeps_lock(id):
                    state = await self._service.ledger.run(self.calls.look_at_batch(id))
                    if state is None or state.ended:
                        return
                    if not await self._turn(id, state):
                        await feed.wait(_TURN_S)
                    feed.lost.clear()
                    feed.entries.clear()
                    # what ends within this time is written together: a turn costs as much for one line as for ten
                    await asyncio.sleep(_PAUSE_S)
        except RedisError as error:
            # the next look for batches takes it up again
            _log.warning("batch_waits_for_redis", batch=id, error=str(error))
        except CarpoolError as error:
            if error.code.status != 503:
                raise
            _log.warning("batch_waits_for_redis", batch=id, error=error.message)
        finally:
            await self._frees_lock(id)

    async def _turn(self, id: str, state: BatchState) -> bool:
        """One step on. False where there was nothing to do."""
        if state.status == "validating":
            return await self._validate(id, state)
        ledger = self._service.ledger
        if state.status == "cancelling":
            for line, status in state.open.items():
                if status in ("queued", "running"):
                    await ledger.run(self._service.calls.cancel(state.job(line)))
        answers = await read_answers(self._service, id, state)
        if answers:
            await ledger.run(self.calls.drain(id, answers))
        page = await self._feeder.next_page(id, state)
        if page is not None:
            verdict = await ledger.run(self.calls.feed(id, page))
            if verdict != "ok":
                _log.debug("batch_page_not_taken", batch=id, verdict=verdict)
            if verdict == "full":
                return bool(answers)  # until something else has left the queue
            pools = {item.acceptance.pool for item in page.items if item.acceptance is not None}
            for pool in pools:
                self._service.wake_pool(pool)
        return bool(answers) or page is not None

    async def _validate(self, id: str, state: BatchState) -> bool:
        max_line = self._service.settings.max_body_bytes
        validation = Validation(state.endpoint, max_line)
        chunk = 0
        try:
            async for line in read_lines(self.store, await self.store.get(state.file, ""), Position(), max_line):
                validation.add(line)
                if validation.is_hopeless:
                    break
                if line.next.chunk != chunk:
                    chunk = line.next.chunk
                    if not await self._keeps_lock(id):
                        return False
            validation.finish()
        except CarpoolError as error:
            validation.errors.append(input_lost(error).body)
        errors = errors_json(validation.errors)
        await self._service.ledger.run(self.calls.validated(id, validation.num_requests, errors))
        return True

    async def _takes_lock(self, id: str) -> bool:
        key, client = keys.batch_lock(id), self._service.client
        return bool(await write_even_when_full_async(client, "SET", key, self._id, "NX", "PX", _LOCK_MS))

    async def _keeps_lock(self, id: str) -> bool:
        key, client = keys.batch_lock(id), self._service.client
        if await client.get(key) != self._id:
            return False
        return bool(await client.pexpire(key, _LOCK_MS))

    async def _frees_lock(self, id: str) -> None:
        key, client = keys.batch_lock(id), self._service.client
        with contextlib.suppress(RedisError):
            if await client.get(key) == self._id:
                await client.delete(key)


def batches_of(request: Request) -> BatchRunner:
    """The batches of the application that a request came to."""
    runner = request.app.state.batches
    if not isinstance(runner, BatchRunner):
        raise TypeError("the application serves only within its lifespan")
    return runner
