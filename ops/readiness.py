"""Who of the parts serves already: asks each one as its clients would, and shows how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx2
from redis.exceptions import RedisError

from ops.child import Child
from ops.display import Display
from ops.instance import RunFile
from tasks.redis_clients import connect_async
from tasks.registry import WorkerInfo, list_workers_async
from tasks.settings import Settings
from tasks.webhook_workers import list_webhook_workers_async

#: How often a part that is starting is asked whether it is there: it has no way to call us.
PROBE_S = 0.1
PROGRESS_S = 0.25


class Readiness:
    """Marks children as ready, at the first start and at each further one.

    Args:
        flower_port: where Flower will listen, if it does.
    """

    def __init__(self, settings: Settings, run_file: RunFile, display: Display, flower_port: int | None) -> None:
        self._settings = settings
        self._api_url = run_file.api_url
        self._display = display
        self._flower_port = flower_port
        self._worker_started = asyncio.Event()
        self._workers: dict[str, WorkerInfo] = {}

    @property
    def models(self) -> str:
        """What the workers that were seen ready serve, in words; "" where there is none."""
        return ", ".join(sorted({f"{info.pool} ({info.engine}, {info.device})" for info in self._workers.values()}))

    async def await_redis(self, child: Child) -> None:
        """Return when the embedded server answers."""
        self._display.phase(child.spec.name, "starting")
        await self._await(child, self._redis_answers)

    async def watch(self, children: Sequence[Child]) -> None:
        """Watch all of them for ever."""
        probes = {"redis": self._redis_answers, "api": self._api_accepts, "flower": self._flower_listens}
        watches = [self._watch(child, probes[child.spec.role]) for child in children if child.spec.role in probes]
        workers = [child for child in children if child.spec.role == "worker"]
        webhooks = [self._watch_webhooks(child) for child in children if child.spec.role == "webhooks"]
        await asyncio.gather(*watches, *webhooks, self._watch_workers(workers))

    def worker_started(self) -> None:
        """A worker's process was started: look at its heartbeat until it is ready."""
        self._worker_started.set()

    async def _await(self, child: Child, probe: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if child.running and await probe() and child.running:
                child.mark_ready()
                return
            await asyncio.sleep(PROBE_S)

    async def _watch(self, child: Child, probe: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if not child.ready:
                await self._await(child, probe)
                where = f"{self._api_url} takes jobs, {self._api_url}/docs" if child.spec.role == "api" else "runs"
                self._display.done(child.spec.name, where)
            await child.unready()

    async def _watch_webhooks(self, child: Child) -> None:
        client = connect_async(self._settings, max_connections=1)

        async def delivers() -> bool:
            try:
                # by pid: the word of a process that was killed counts for a while
                return child.entry.pid in {worker.pid for worker in await list_webhook_workers_async(client)}
            except RedisError:
                return False

        try:
            await self._watch(child, delivers)
        finally:
            await client.aclose()

    async def _watch_workers(self, workers: Sequence[Child]) -> None:
        client = connect_async(self._settings, max_connections=2)
        try:
            while True:
                self._worker_started.clear()
                while not all(child.ready for child in workers):
                    with suppress(RedisError):  # a server that went away comes back, or its guardian gives up
                        self._look(workers, await list_workers_async(client))
                    await asyncio.sleep(PROGRESS_S)
                await self._worker_started.wait()
        finally:
            await client.aclose()

    def _look(self, workers: Sequence[Child], heartbeats: Sequence[WorkerInfo]) -> None:
        # By pid too: the heartbeat of a process that was killed lives on for a while.
        known = {(info.name, info.pid): info for info in heartbeats}
        for child in workers:
            name = child.spec.name
            info = known.get((name, child.entry.pid or 0))
            if info is None or child.ready or not child.running:
                continue
            if info.state == "ready":
                self._workers[name] = info
                child.mark_ready()
                self._display.done(name, f"ready: {info.pool} on {info.device}, {info.slots} slots")
            else:
                self._display.phase(name, info.phase or info.state, info.progress)

    async def _redis_answers(self) -> bool:
        client = connect_async(self._settings, max_connections=1)
        try:
            await client.ping()
        except RedisError:  # not up yet, or still reading its append-only file
            return False
        else:
            return True
        finally:
            await client.aclose()

    async def _api_accepts(self) -> bool:
        # trust_env: a proxy in the environment is not for our own loopback address.
        async with httpx2.AsyncClient(timeout=5, trust_env=False) as client:
            try:
                return (await client.get(f"{self._api_url}/health/accepting")).status_code == 200
            except httpx2.TransportError:
                return False

    async def _flower_listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._flower_port)
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True
