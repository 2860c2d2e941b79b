"""The keeper of the ledger: a thread in every API and worker process that reaps what is due and invites what waits.

Any number of keepers is right, since each transition is one atomic script; a lock only saves them work.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from tasks import entries, keys
from tasks.ledger import SyncLedger
from tasks.metric_calls import TALLY_PAGE, MetricCalls
from tasks.redis_clients import connect, ledger_is_newer, write_even_when_full
from tasks.settings import Settings

_log = structlog.get_logger("carpool.keeper")
#: A dead holder's lock and the next one's tick together stay well under 3 s, where an outage would be seen.
_LOCK_MS = 1400
_REAP_PAGE = 50


class Keeper:
    """Pumps a pool as soon as it is told to, and looks at everything once a tick.

    It also says for its process which version of the ledger that reads, and learns which one is written.

    Args:
        invitation: template of the message of an invitation (`tasks.invitations`).
        on_outdated: called, from the keeper's thread, with what to tell the user, where all others have gone on to a
            version that this process does not read: it slept for a minute. What is due is left to them from then on.
    """

    def __init__(self, settings: Settings, invitation: str, on_outdated: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._invitation = invitation
        self._on_outdated = on_outdated
        self._id = uuid.uuid4().hex
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="carpool-keeper", daemon=True)
        self._stopping = threading.Event()
        self._trouble = ""
        self._version = entries.VERSION
        self._metrics = MetricCalls(settings)

    def start(self) -> None:
        self._thread.start()

    def wake(self, pool: str) -> None:
        """Ask for a pump of this pool, from any thread; returns at once."""
        self._wanted.put(pool)

    def close(self) -> None:
        """End the thread; bounded by the Redis timeout."""
        self._stopping.set()
        self._wanted.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=4 * self._settings.redis_timeout_s)

    def _run(self) -> None:
        client = connect(self._settings)
        ledger = SyncLedger(client, self._settings, self._invitation)
        next_tick = time.monotonic()
        try:
            while not self._stopping.is_set():
                pools = self._wait(max(0.0, next_tick - time.monotonic()))
                if self._stopping.is_set():
                    return
                try:
                    for pool in pools:
                        ledger.run(ledger.calls.pump(pool))
                    if time.monotonic() >= next_tick:
                        next_tick = time.monotonic() + self._settings.reaper_tick_s
                        self._tick(ledger)
                    self._recovered()
                except (RedisError, OSError) as error:
                    # whatever was wanted is seen again by the next tick
                    self._failed(error)
        finally:
            client.close()

    def _wait(self, timeout_s: float) -> set[str]:
        """The pools that were asked for, all that is known by now. None at the tick."""
        wanted: set[str | None] = set()
        with contextlib.suppress(queue.Empty):
            wanted.add(self._wanted.get(timeout=timeout_s))
            while True:
                wanted.add(self._wanted.get_nowait())
        return {pool for pool in wanted if pool is not None}

    def _tick(self, ledger: SyncLedger) -> None:
        self._agree(ledger)
        if self._version > entries.VERSION or not self._holds_lock(ledger):
            return
        looked_at = _REAP_PAGE
        while looked_at == _REAP_PAGE and not self._stopping.is_set():
            looked_at = ledger.run(ledger.calls.reap()).looked_at
        for pool in ledger.client.hkeys(keys.MODELS):
            ledger.run(ledger.calls.pump(str(pool)))
        # last: jobs come before their numbers
        counted = TALLY_PAGE
        while counted == TALLY_PAGE and not self._stopping.is_set():
            counted = ledger.run(self._metrics.tally())

    def _agree(self, ledger: SyncLedger) -> None:
        version = ledger.run(ledger.calls.agree())
        if version > max(self._version, entries.VERSION):
            _log.error("ledger_is_newer", advice=ledger_is_newer(version))
            if self._on_outdated is not None:
                self._on_outdated(ledger_is_newer(version))
        self._version = version

    def _holds_lock(self, ledger: SyncLedger) -> bool:
        if write_even_when_full(ledger.client, "SET", keys.REAPER, self._id, "NX", "PX", _LOCK_MS):
            return True
        return bool(ledger.client.get(keys.REAPER) == self._id and ledger.client.pexpire(keys.REAPER, _LOCK_MS))

    def _failed(self, error: Exception) -> None:
        if not self._trouble:
            _log.warning("keeper_waits_for_redis", error=str(error))
        self._trouble = str(error)

    def _recovered(self) -> None:
        if self._trouble:
            _log.info("keeper_reached_redis_again")
        self._trouble = ""
