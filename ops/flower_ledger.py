"""What Flower shows, held to the ledger: Celery's events are sent once and to whoever listens, the ledger is the truth.

Events tell of what workers do with a message. Of a job that waits for its turn there is no message yet, of one that is
cancelled or expires meanwhile there never will be, and a worker that is killed sends no end. So Flower looks at the
ledger, and mends each job that it shows otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from celery import states
from redis.exceptions import RedisError

from tasks import keys
from tasks.redis_clients import connect
from tasks.registry import list_workers
from tasks.settings import Settings

_log = structlog.get_logger("carpool.flower")
LOOK_S: Final = 1.0
#: Of the jobs that have not ended, so many are shown: those that ride, and those that have the least time left.
MOST_LIVE: Final = 2000
#: Tasks of Flower that have not ended there, asked for in one look.
MOST_OPEN: Final = 2000
_FIELDS: Final = (
    "status",
    "created_at",
    "started_at",
    "finished_at",
    "incarnation",
    "worker",
    "k",
    "finish_reason",
    "error",
)
_STATES: Final = {
    # accepted, and as far as Celery's tools can tell, received: then Flower offers to revoke it
    "queued": states.RECEIVED,
    "running": states.STARTED,
    "succeeded": states.SUCCESS,
    "cancelled": states.REVOKED,
    "failed": states.FAILURE,
    "expired": states.FAILURE,
}
_ENDS: Final = {states.SUCCESS: "succeeded", states.REVOKED: "revoked", states.FAILURE: "failed"}


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A job as its record says. Times in seconds since the epoch, None for what has not happened.

    Attributes:
        worker: as Celery names it, "" where it has none that lives.
        summary: its result in a few words, as the worker would have put it.
    """

    id: str
    state: str
    created_at: float | None
    started_at: float | None
    finished_at: float | None
    worker: str
    summary: str


class LedgerView:
    """Reads jobs from the ledger; one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._client = connect(settings)

    def look(self, known: Iterable[str]) -> list[LedgerJob]:
        """The jobs that have not ended, and those of `known` that have. Raises RedisError."""
        live = [str(id) for id in self._client.zrange(keys.DUE, 0, MOST_LIVE - 1)]
        ids = list(dict.fromkeys((*live, *known)))
        if not ids:
            return []
        hosts = {one.incarnation: f"{one.name}@{one.host}" for one in list_workers(self._client)}
        with self._client.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hmget(keys.record(id), _FIELDS)
            found = pipeline.execute()
        return [job for id, values in zip(ids, found, strict=True) if (job := _job(id, values, hosts)) is not None]


def _job(id: str, values: Sequence[str | None], hosts: dict[str, str]) -> LedgerJob | None:
    raw = {name: value or "" for name, value in zip(_FIELDS, values, strict=True)}
    state = _STATES.get(raw["status"])
    if state is None:  # it has expired, or is of a newer release
        return None
    return LedgerJob(
        id=id,
        state=state,
        created_at=_seconds(raw["created_at"]),
        started_at=_seconds(raw["started_at"]),
        finished_at=_seconds(raw["finished_at"]),
        worker=hosts.get(raw["incarnation"], ""),
        summary=f"{raw['k'] or 0} tokens, {raw['finish_reason'] or raw['status']}",
    )


def _seconds(milliseconds: str) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None


class LedgerSync:
    """Mends the tasks of Flower's events. Everything but the reading runs on Flower's own loop.

    Args:
        events: Flower's, whose `state` holds the tasks.
    """

    def __init__(self, view: LedgerView, events: Any) -> None:
        self._view = view
        self._events = events
        #: Ends that were seen once: the event has a look's time to come, and says more.
        self._ended: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; from the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                jobs = await asyncio.to_thread(self._view.look, self.open_tasks())
            except (RedisError, OSError) as error:
                _log.debug("ledger_not_read", error=str(error))
            else:
                self.mend(jobs)
            await asyncio.sleep(LOOK_S)

    def open_tasks(self) -> list[str]:
        """Jobs that have not ended as far as Flower knows, the newest of them."""
        tasks = self._events.state.tasks
        found = [
            id for id, task in tasks.items() if task.name == keys.TASK_NAME and task.state not in states.READY_STATES
        ]
        return found[-MOST_OPEN:]

    def mend(self, jobs: Sequence[LedgerJob]) -> None:
        """Bring each of these jobs to its state, unless an event has."""
        ended = {job.id for job in jobs if job.state in states.READY_STATES}
        for job in jobs:
            if job.id in ended and job.id not in self._ended:
                continue
            self._mend(job)
        self._ended = ended

    def _mend(self, job: LedgerJob) -> None:
        state = self._events.state
        task = state.tasks.data.get(job.id)
        if task is not None and task.state in (job.state, *states.READY_STATES) and self._is_placed(task, job):
            return
        evicted = state._eviction_candidate(job.id)
        if task is None:
            task = state.tasks[job.id] = state.Task(job.id, cluster_state=state)
            task.__dict__.update(name=keys.TASK_NAME, args="()", kwargs="{…}", retries=0)
            state.tasks_by_type[keys.TASK_NAME].add(task)
        if task.sent is None and task.received is None:
            # the time by which Flower sorts; a job is received when it is accepted
            task.__dict__.update(sent=job.created_at, received=job.created_at)
        self._set(task, job)
        state._index_task(task, evicted)

    def _is_placed(self, task: Any, job: LedgerJob) -> bool:
        """Whether a job that rides is shown where it rides; after its worker's death it goes on elsewhere."""
        if job.state != states.STARTED or not job.worker:
            return True
        return task.worker is not None and task.worker.hostname == job.worker

    def _set(self, task: Any, job: LedgerJob) -> None:
        if job.state == states.RECEIVED:
            # it is new here, or its worker has died and it waits for another one
            task.__dict__.update(state=job.state, worker=None, timestamp=job.created_at)
            return
        if job.started_at is not None and task.started is None:
            task.started = job.started_at
        if job.worker:
            task.worker = self._events.state.workers.data.get(job.worker) or task.worker
        if job.state == states.STARTED:
            task.__dict__.update(state=states.STARTED, timestamp=task.started)
            return
        runtime = job.finished_at - job.started_at if job.finished_at and job.started_at else None
        task.__dict__.update(state=job.state, timestamp=job.finished_at, runtime=runtime)
        setattr(task, _ENDS[job.state], job.finished_at)
        if job.state == states.SUCCESS:
            task.result = job.summary
        elif job.state == states.FAILURE:
            task.exception = job.summary
