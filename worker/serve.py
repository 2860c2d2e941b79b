"""The Celery worker of a generation pool: pool solo, concurrency 1, one unacknowledged message a slot."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import redis
import structlog
from celery import signals
from celery.worker import state as celery_state
from redis.exceptions import RedisError

from tasks import keys
from tasks.app import create_celery
from tasks.codes import CarpoolError
from tasks.lifeline import watch_lifeline
from tasks.redis_clients import check_server, connect, redacted
from tasks.reports import Reports
from tasks.settings import Settings
from tasks.tracing import Tracing, start_tracing
from worker import remote_control
from worker.broker import use_gate
from worker.llm_engine import LLMEngine
from worker.model_executor import ModelExecutor
from worker.ride_reports import RideReports

if TYPE_CHECKING:
    from worker.ride_spans import RideSpans

_log = structlog.get_logger("carpool.worker")
#: A worker whose supervisor is gone may take so long to end after its drain.
_AFTER_DRAIN_S = 20.0
#: Redis may start beside us, so that the model loads meanwhile; then the supervisor is told that it is away.
_REDIS_START_S = 10.0
_PROBE_S = 0.1


def serve(settings: Settings, name: str, executor: ModelExecutor, inbox: queue.SimpleQueue[Any]) -> int:
    """Serve until drained; as `worker.main.run`. `executor` is started, and its events come to `inbox`."""
    with _needing_redis(settings), connect(settings) as client:
        _await_server(client, settings)
    celery = create_celery(settings)
    celery.set_current()
    celery.set_default()
    shutdown = _Shutdown()
    tracing, reports = start_tracing(settings, "worker", name), Reports()
    told = RideReports(reports, _spans(tracing), name, settings.pool)
    engine = LLMEngine(settings, celery, name, shutdown.give_up, executor, inbox, told)
    celery.llm_engine = engine
    use_gate(celery.conf, engine.num_wanted)
    remote_control.install(celery, settings)
    worker = celery.Worker(
        hostname=f"{name}@{socket.gethostname()}",
        pool="solo",
        concurrency=1,
        queues=[keys.queue(settings.pool), keys.NATIVE_QUEUE],
        loglevel="WARNING",
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    signals.worker_ready.connect(lambda **_: shutdown.install(engine), weak=False)
    reports.start()
    with _needing_redis(settings):
        engine.start()
    watch_lifeline(kill_after_s=settings.drain_s + _AFTER_DRAIN_S)
    try:
        worker.start()
    finally:
        engine.close()
        reports.close()
        if tracing is not None:
            tracing.close()
    if shutdown.cause:
        _log.error("worker_cannot_serve", cause=shutdown.cause)
        raise CarpoolError("no_worker", shutdown.cause)
    return int(worker.exitcode or 0)


def _spans(tracing: Tracing | None) -> RideSpans | None:
    if tracing is None:
        return None
    from worker.ride_spans import RideSpans

    return RideSpans(tracing)


def _await_server(client: redis.Redis, settings: Settings) -> None:
    """Check the server, once it answers. Raises CarpoolError where it cannot be used, or does not answer in time."""
    until = time.monotonic() + _REDIS_START_S
    while True:
        try:
            check_server(client, settings.redis_url)
            return
        except CarpoolError as error:
            if not isinstance(error.__cause__, RedisError) or time.monotonic() >= until:
                raise
        time.sleep(_PROBE_S)  # nothing tells that a port has opened


@contextmanager
def _needing_redis(settings: Settings) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        where = redacted(settings.redis_url)
        raise CarpoolError(
            "redis_unavailable", f"Redis at {where} went away, or takes no writes ({error}): look at its log"
        ) from error


class _Shutdown:
    """From the first signal to Celery's warm shutdown: the event loop goes on until the engine has drained."""

    def __init__(self) -> None:
        self.cause = ""
        self._engine: LLMEngine | None = None
        self._asked = threading.Event()

    def install(self, engine: LLMEngine) -> None:
        """Take the signals over from Celery, whose warm shutdown would end the event loop first."""
        self._engine = engine
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._end_when_drained, name="carpool-shutdown", daemon=True).start()
        if self.cause:
            engine.drain()

    def give_up(self, cause: str) -> None:
        """The engine cannot go on."""
        self.cause = self.cause or cause
        if self._engine is not None:
            self._engine.drain()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            os._exit(128 + number)
        self._asked.set()
        if self._engine is not None:
            self._engine.drain()

    def _end_when_drained(self) -> None:
        if self._engine is None:
            return
        self._engine.drained.wait()
        setattr(celery_state, "should_stop", os.EX_OK)  # noqa: B010 - its stub says None
        self._engine.celery_side.wake()
