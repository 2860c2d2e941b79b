"""A thread that tells of jobs, in logs and spans, so that whoever has something to tell neither waits nor renders.

A log may be a pipe that nobody reads, and a line takes as long as a call of Redis.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

import structlog

_log = structlog.get_logger("carpool.reports")
#: More than so many are dropped: whoever reads them is away.
_MOST: Final = 10_000


class Reports:
    """Makes reports one after the other. `put` may be called from any thread and never blocks.

    Attributes:
        num_dropped: reports that were not made.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="carpool-reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, report: Callable[[], object]) -> None:
        """Have a report made."""
        if self._queue.qsize() < _MOST:
            self._queue.put(report)
        else:
            self.num_dropped += 1

    def close(self, timeout_s: float = 1.0) -> None:
        """Make what is left, for `timeout_s` at most."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self.num_dropped:
            _log.warning("reports_dropped", number=self.num_dropped)

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                report()
            except Exception:  # noqa: BLE001 - one that cannot be told must not silence all that follow
                _log.exception("report_failed")
