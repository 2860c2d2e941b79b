"""From the outbox to the broker: a thread that sends a message for each webhook that is due.

It hears of an end at once, and looks once a second all the same: the outbox is the truth. Any number of dispatchers is
right, since each look is one atomic script.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final

import structlog
from redis.client import PubSub
from redis.exceptions import RedisError

from tasks import keys
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.settings import Settings
from tasks.webhook_calls import WebhookCalls
from tasks.webhook_workers import ALIVE_S, WebhookWorker

_log = structlog.get_logger("carpool.webhooks")
_TICK_S: Final = 1.0
_RECONNECT_S: Final = 0.5


class Dispatcher:
    """Sends messages until it is closed.

    Args:
        calls: with the template of the message.
        most_messages: in the broker at once.
    """

    def __init__(self, settings: Settings, calls: WebhookCalls, worker: WebhookWorker, most_messages: int) -> None:
        self._settings = settings
        self._calls = calls
        self._worker = worker
        self._most_messages = most_messages
        self._stopping = threading.Event()
        self._has_trouble = False
        self._thread = threading.Thread(target=self._run, name="carpool-dispatcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send no further message; returns at once."""
        self._stopping.set()

    def close(self) -> None:
        """End the thread; bounded by the Redis timeout."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=_TICK_S + 4 * self._settings.redis_timeout_s)

    def _run(self) -> None:
        with connect(self._settings) as client:
            ledger = SyncLedger(client, self._settings)
            while not self._stopping.is_set():
                try:
                    with contextlib.closing(client.pubsub(ignore_subscribe_messages=True)) as channel:
                        channel.subscribe(keys.webhooks_channel(self._calls.db))
                        self._dispatch(ledger, channel)
                except (RedisError, OSError) as error:
                    if not self._has_trouble:
                        _log.warning("webhooks_wait_for_redis", error=str(error))
                    self._has_trouble = True
                    self._stopping.wait(_RECONNECT_S)
            with contextlib.suppress(RedisError, OSError):  # it runs out by itself
                client.zrem(keys.HOOK_WORKERS, self._worker.encode())

    def _dispatch(self, ledger: SyncLedger, channel: PubSub) -> None:
        pump = self._calls.pump_webhooks(self._worker.encode(), round(ALIVE_S * 1000), self._most_messages)
        while not self._stopping.is_set():
            sent = ledger.run(pump)
            if self._has_trouble:
                _log.info("webhooks_reached_redis_again")
            self._has_trouble = False
            wait_s = _TICK_S if sent.look_again_s is None else min(_TICK_S, sent.look_again_s)
            # many ends at once are one look
            while not self._stopping.is_set() and channel.get_message(timeout=wait_s) is not None:
                wait_s = 0.0
