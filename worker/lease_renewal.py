"""Renewal of leases: a thread with its own client, so that a long prefill or load loses no ride."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from tasks import keys
from tasks.ledger import SyncLedger
from tasks.ledger_types import Rider, SlotAnswer
from tasks.redis_clients import connect
from tasks.settings import Settings

_log = structlog.get_logger("carpool.worker")


class LeaseRenewal:
    """Renews the leases of all rides every `renew_s`, while the engine makes progress.

    A live thread must not hide a dead engine: where `is_engine_alive` says no, the leases run out.
    """

    def __init__(
        self,
        settings: Settings,
        riders: Callable[[], tuple[tuple[Rider, str], ...]],
        is_engine_alive: Callable[[], bool],
        on_answers: Callable[[list[tuple[Rider, SlotAnswer]]], None],
    ) -> None:
        """`riders` gives each rider with its delivery tag ("" where there is none)."""
        self._settings = settings
        self._riders = riders
        self._is_engine_alive = is_engine_alive
        self._on_answers = on_answers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carpool-renewal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=4 * self._settings.redis_timeout_s)

    def _run(self) -> None:
        client = connect(self._settings)
        ledger = SyncLedger(client, self._settings)
        wait_s = self._settings.renew_s
        try:
            while not self._stopping.wait(wait_s):
                # after a failure the renewal is the first call that reaches Redis again
                wait_s = self._settings.renew_s if self._renew(ledger) else min(0.2, self._settings.renew_s)
        finally:
            client.close()

    def _renew(self, ledger: SyncLedger) -> bool:
        riders = self._riders()
        if not riders or not self._is_engine_alive():
            return True
        try:
            answers = ledger.run(ledger.calls.renew([rider for rider, _ in riders]))
            tags = {tag: time.time() for _, tag in riders if tag}
            if tags:
                # the broker must not redeliver what is still being worked on
                ledger.client.zadd(keys.UNACKED_INDEX, tags, xx=True)
        except (RedisError, OSError) as error:
            _log.debug("leases_not_renewed", error=str(error))
            return False
        self._on_answers([(rider, answer) for (rider, _), answer in zip(riders, answers, strict=True)])
        return True
