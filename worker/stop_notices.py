"""Stop notices: a thread hears at once which of the worker's jobs have to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from tasks import keys
from tasks.redis_clients import connect
from tasks.settings import Settings

_log = structlog.get_logger("carpool.worker")


class StopNotices:
    """Listens on the worker's own channel for jobs that have to stop; the answers to step and renew say the same."""

    def __init__(self, settings: Settings, db: int, incarnation: str, on_stop: Callable[[str], None]) -> None:
        self._settings = settings
        self._channel = keys.owner_channel(db, incarnation)
        self._on_stop = on_stop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carpool-stop-notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=4 * self._settings.redis_timeout_s)

    def _run(self) -> None:
        client = connect(self._settings)
        try:
            while not self._stopping.is_set():
                try:
                    with client.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call] # theirs
                        pubsub.subscribe(self._channel)
                        while not self._stopping.is_set():
                            message = pubsub.get_message(timeout=0.5)
                            if message is not None:
                                self._on_stop(str(message["data"]))
                except (RedisError, OSError) as error:
                    _log.debug("stop_notices_lost", error=str(error))
                    self._stopping.wait(0.5)
        finally:
            client.close()
