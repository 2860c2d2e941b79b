"""The heartbeat of a worker: a thread with its own client says that the worker lives, and what it is doing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from tasks import keys
from tasks.keeper import Keeper
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.registry import HEARTBEATS_MISSED, WorkerInfo, keep_card, worker_fields
from tasks.settings import Settings
from worker.step_times import StepReports

_log = structlog.get_logger("carpool.worker")


class Heartbeat:
    """Says that the worker lives: every `heartbeat_s`, and at once when its state or its free slots change."""

    def __init__(
        self,
        settings: Settings,
        keeper: Keeper,
        describe: Callable[[], tuple[WorkerInfo, str]],
        reports: StepReports,
    ) -> None:
        """`describe` gives the worker as it is now, and the key of its card ("" before it is loaded)."""
        self._settings = settings
        self._keeper = keeper
        self._describe = describe
        self._reports = reports
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carpool-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something changed; from any thread."""
        self._changed.set()

    def close(self) -> None:
        """End the thread and take the worker off the list."""
        self._stopping.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=4 * self._settings.redis_timeout_s)

    def _run(self) -> None:
        client = connect(self._settings)
        ledger = SyncLedger(client, self._settings)
        ttl_ms = round(HEARTBEATS_MISSED * self._settings.heartbeat_s * 1000)
        try:
            while not self._stopping.is_set():
                self._changed.clear()
                worker, card = self._describe()
                try:
                    pools = [worker.pool]
                    if ledger.run(ledger.calls.heartbeat(worker.incarnation, pools, ttl_ms, worker_fields(worker))):
                        self._keeper.wake(worker.pool)
                    if card:
                        keep_card(client, card)
                    self._reports.tell(ledger, worker.incarnation, worker.pool)
                except (RedisError, OSError) as error:
                    _log.debug("heartbeat_not_sent", error=str(error))
                self._changed.wait(self._settings.heartbeat_s)
            self._sign_off(ledger)
        finally:
            client.close()

    def _sign_off(self, ledger: SyncLedger) -> None:
        worker, _ = self._describe()
        try:
            self._reports.tell(ledger, worker.incarnation, worker.pool, is_last=True)
            ledger.client.zrem(keys.pool_workers(worker.pool), worker.incarnation)
            ledger.client.delete(keys.worker(worker.incarnation))
        except (RedisError, OSError) as error:
            # its heartbeat runs out by itself
            _log.debug("sign_off_not_sent", error=str(error))
