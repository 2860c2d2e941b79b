"""`carpool status`: every process of an instance, as the kernel, the run file and the heartbeats know it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psutil
from redis.exceptions import RedisError

from ops.errors import ExitCode
from ops.instance import DataDir, ProcessEntry, Role, RunFile
from ops.process import ProcessIdentity
from ops.redis_guardian import read_server
from tasks.redis_clients import connect
from tasks.registry import WorkerInfo, list_workers
from tasks.settings import Settings
from tasks.webhook_workers import WebhookWorker, list_webhook_workers

GOOD = frozenset({"running", "ready"})


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process.

    Attributes:
        pid: None where there is no process, or not on this machine.
        state: running or ready; starting, loading, restarting, draining, stopping, stalled; stopped, failed, dead,
            unreachable.
        detail: phase of a load, or why it ended; "" where there is nothing to say.
        progress: fraction of a load, from 0 to 1.
        restarts: how often the supervisor started it again.
        started_at: UTC, of the process.
        pool: of a worker and its Model worker: the alias under which the model is served.
        model: its own name or place.
        version: of Carpool.
        tokens_per_s: how many a worker has written lately, of all its slots together.
    """

    role: Role
    name: str
    pid: int | None
    state: str
    detail: str = ""
    progress: float | None = None
    restarts: int = 0
    started_at: str | None = None
    host: str = ""
    pool: str = ""
    engine: str = ""
    device: str = ""
    slots: int | None = None
    free: int | None = None
    model: str = ""
    dtype: str = ""
    context_length: int | None = None
    version: str = ""
    tokens_per_s: float | None = None

    @property
    def serves(self) -> str:
        """What a worker serves, and how busy it is, in words; "" of every other process."""
        if not self.pool or self.slots is None or self.free is None:
            return ""
        own_name = f" ({self.model})" if self.model not in ("", self.pool) else ""
        how = ", ".join(part for part in (self.engine, self.dtype, self.device) if part not in ("", "none"))
        speed = f", {self.tokens_per_s:.0f} tokens/s" if self.tokens_per_s else ""
        return f"{self.pool}{own_name} on {how}: {self.slots - self.free} of {self.slots} slots ride{speed}"


def read_heartbeats(settings: Settings) -> list[WorkerInfo] | None:
    """The workers' heartbeats, or None where Redis does not answer."""
    try:
        with connect(settings) as client:
            return list_workers(client)
    except RedisError:
        return None


def read_webhook_workers(settings: Settings) -> list[WebhookWorker] | None:
    """The workers that deliver webhooks, or None where Redis does not answer."""
    try:
        with connect(settings) as client:
            return list_webhook_workers(client)
    except RedisError:
        return None


def collect(
    data: DataDir,
    run: RunFile | None,
    heartbeats: Sequence[WorkerInfo] | None,
    webhooks: Sequence[WebhookWorker] | None = None,
) -> list[ProcessStatus]:
    """Every process of the instance, and workers elsewhere that share its Redis.

    Args:
        run: the instance's run file, or None where none runs here.
        heartbeats: None where Redis does not answer.
        webhooks: workers that deliver webhooks; None where Redis does not answer.
    """
    found: list[ProcessStatus] = []
    seen: set[str] = set()
    entries = run.processes if run is not None else ()
    supervised = any(entry.role == "supervisor" and _alive(entry) for entry in entries)
    for entry in entries:
        beat = next((b for b in heartbeats or () if (b.name, b.pid) == (entry.name, entry.pid)), None)
        if entry.role == "redis":
            found.append(_redis(data, entry, supervised, answers=heartbeats is not None))
        elif entry.role == "worker":
            seen |= {beat.incarnation} if beat else set()
            found.append(_worker(entry, beat, supervised, answers=heartbeats is not None))
            found.extend(_model_workers(entry, beat))
        elif entry.role == "webhooks":
            found.append(_webhooks(entry, webhooks, supervised))
        else:
            found.append(_plain(entry, supervised))
    if run is not None and not run.embedded_redis:
        found.insert(1, ProcessStatus("redis", "redis", None, "unreachable" if heartbeats is None else "running"))
    for beat in heartbeats or ():
        # The heartbeat of a process that was killed lives on for a while.
        lives = beat.host != socket.gethostname() or psutil.pid_exists(beat.pid)
        if beat.incarnation not in seen and lives:
            found.extend(_elsewhere(beat))
    known = {entry.pid for entry in entries}
    for other in webhooks or ():
        is_here = other.host == socket.gethostname()
        if not (is_here and (other.pid in known or not psutil.pid_exists(other.pid))):
            found.append(ProcessStatus("webhooks", other.name, other.pid, "running", host=other.host))
    return found


def exit_code(found: Sequence[ProcessStatus]) -> ExitCode:
    """OK: all run and are ready; NOT_READY: some do; NOT_RUNNING: none does."""
    if not any(status.pid is not None and status.state not in ("stopped", "failed", "dead") for status in found):
        return ExitCode.NOT_RUNNING
    return ExitCode.OK if all(status.state in GOOD for status in found) else ExitCode.NOT_READY


def _alive(entry: ProcessEntry) -> bool:
    return entry.identity is not None and entry.identity.alive


def _started_at(created: float | None) -> str | None:
    return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}" if created is not None else None


def _state(entry: ProcessEntry, supervised: bool) -> tuple[str, str]:
    """State and detail of a supervised process: the kernel's word counts before the run file's."""
    if _alive(entry):
        if supervised or entry.role == "supervisor":
            return entry.state, entry.cause
        return "draining", "its supervisor has ended"
    if entry.state in ("stopped", "failed"):
        return entry.state, entry.cause
    if supervised:
        return "restarting", entry.cause
    return "dead", entry.cause


def _plain(entry: ProcessEntry, supervised: bool) -> ProcessStatus:
    state, detail = _state(entry, supervised)
    return ProcessStatus(
        entry.role,
        entry.name,
        entry.pid if _alive(entry) else None,
        state,
        detail,
        restarts=entry.restarts,
        started_at=_started_at(entry.created),
    )


def _redis(data: DataDir, entry: ProcessEntry, supervised: bool, *, answers: bool) -> ProcessStatus:
    """The server itself: its guardian is only the process that owns it."""
    state, detail = _state(entry, supervised)
    server = read_server(data.redis)
    alive = server is not None and server.alive
    if alive and not answers:
        state, detail = "unreachable", "it does not answer"
    elif not alive and state not in ("stopped", "failed"):
        state = "restarting" if supervised else "dead"
    return ProcessStatus(
        "redis",
        entry.name,
        server.pid if server is not None and alive else None,
        state,
        detail,
        restarts=entry.restarts,
        started_at=_started_at(server.created) if server is not None and alive else None,
    )


def _worker(entry: ProcessEntry, beat: WorkerInfo | None, supervised: bool, *, answers: bool) -> ProcessStatus:
    plain = _plain(entry, supervised)
    if plain.pid is None:
        return plain
    if beat is None:
        # It was ready once, and Redis would know of its heartbeat.
        stalled = answers and plain.state == "running"
        return replace(plain, state="stalled", detail="no heartbeat") if stalled else plain
    return replace(
        plain,
        state=beat.state if plain.state in ("starting", "running") else plain.state,
        detail=plain.detail or (beat.phase if beat.state != "ready" else ""),
        progress=beat.progress if beat.state != "ready" else None,
        **_of_worker(beat),
    )


def _of_worker(beat: WorkerInfo) -> dict[str, Any]:
    """What only a worker has to say of itself."""
    return {
        **_of_model(beat),
        "slots": beat.slots,
        "free": beat.free,
        "tokens_per_s": beat.tokens_per_s,
    }


def _of_model(beat: WorkerInfo) -> dict[str, Any]:
    names = ("host", "pool", "engine", "device", "model", "dtype", "context_length", "version")
    return {name: getattr(beat, name) for name in names}


def _webhooks(entry: ProcessEntry, heard: Sequence[WebhookWorker] | None, supervised: bool) -> ProcessStatus:
    plain = _plain(entry, supervised)
    if plain.pid is None or heard is None or plain.state != "running":
        return plain
    if plain.pid not in {worker.pid for worker in heard}:
        return replace(plain, state="stalled", detail="it does not look for webhooks")
    return replace(plain, host=socket.gethostname())


def _model_workers(entry: ProcessEntry, beat: WorkerInfo | None) -> Iterator[ProcessStatus]:
    """The Model worker of a worker on this machine: by its heartbeat, else the child that the worker has spawned."""
    name = f"{entry.name}/model"
    if beat is not None and _alive(entry):
        alive = beat.child_pid is not None and psutil.pid_exists(beat.child_pid)
        pid = beat.child_pid if alive else None
        created = None
        with suppress(psutil.NoSuchProcess):
            created = psutil.Process(pid).create_time() if pid is not None else None
        loading = beat.state != "ready"
        yield ProcessStatus(
            "model-worker",
            name,
            pid,
            beat.state if alive else "restarting",
            beat.phase if loading else "",
            beat.progress if loading else None,
            started_at=_started_at(created),
        )
        return
    worker = entry.identity.process() if entry.identity else None
    for child in spawned_children(worker):
        yield ProcessStatus("model-worker", name, child.pid, "running", started_at=_started_at(child.created))


def spawned_children(worker: psutil.Process | None) -> list[ProcessIdentity]:
    """Processes that a worker has spawned with multiprocessing, without its resource tracker."""
    found = []
    if worker is not None:
        with suppress(psutil.NoSuchProcess):
            for child in worker.children():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if any("spawn_main" in part for part in child.cmdline()):
                        found.append(ProcessIdentity(child.pid, child.create_time()))
    return found


def _elsewhere(beat: WorkerInfo) -> Iterator[ProcessStatus]:
    """A worker that this instance's supervisor has not started, as its heartbeat describes it."""
    detail = beat.phase if beat.state != "ready" else ""
    progress = beat.progress if beat.state != "ready" else None
    yield ProcessStatus("worker", beat.name, beat.pid, beat.state, detail, progress, **_of_worker(beat))
    yield ProcessStatus(
        "model-worker", f"{beat.name}/model", beat.child_pid, beat.state, detail, progress, **_of_model(beat)
    )
