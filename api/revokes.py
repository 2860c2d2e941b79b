"""Celery's revokes, heard by the API too: a job is cancelled in the ledger also while no worker is up to hear of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from typing import Any

import structlog
from celery import Celery
from celery.utils.functional import maybe_list
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.settings import Settings

_log = structlog.get_logger("carpool.celery")
#: A turn of the loop lasts so long at most, so that the thread can be ended.
_TURN_S = 0.5
_RECONNECT_S = 1.0


class RevokeListener:
    """A thread that listens where Celery broadcasts its remote control commands. It answers none of them."""

    def __init__(self, settings: Settings, celery: Celery) -> None:
        self._settings = settings
        self._celery = celery
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carpool-revokes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; bounded by the Redis timeout."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._settings.redis_timeout_s + _TURN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except (OperationalError, RedisError, OSError) as error:
                _log.debug("revokes_are_not_heard", error=str(error))
                self._stopping.wait(_RECONNECT_S)

    def _listen(self) -> None:
        client = connect(self._settings)
        ledger = SyncLedger(client, self._settings)

        def heard(body: Any, message: Any) -> None:
            if isinstance(body, dict) and body.get("method") in ("revoke", "terminate"):
                ids = maybe_list((body.get("arguments") or {}).get("task_id")) or []
                answers = {str(id): ledger.run(ledger.calls.cancel(str(id))) for id in ids}
                _log.info("cancelled_by_remote_control", answers=answers)

        name = f"carpool-api-{uuid.uuid4().hex[:12]}@{socket.gethostname()}"
        with contextlib.closing(client), self._celery.connection_for_read() as connection:
            control: Any = self._celery.control
            node = control.mailbox.Node(name, channel=connection.default_channel)
            consumer = node.listen(callback=heard)
            try:
                while not self._stopping.is_set():
                    # a turn in which nothing came
                    with contextlib.suppress(TimeoutError):
                        connection.drain_events(timeout=_TURN_S)
            finally:
                consumer.cancel()
