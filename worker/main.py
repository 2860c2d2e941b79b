"""Entry of a generation worker: the model begins to load, and beside it everything else is imported and connected."""

from __future__ import annotations

import queue
from typing import Any

from tasks.logs import configure_logging
from tasks.settings import Settings
from worker.model_executor import ModelExecutor

_CLOSE_S = 5.0


def run(settings: Settings, name: str) -> int:
    """Serve until drained (SIGTERM, SIGINT, the end of the supervisor). Returns the exit code.

    0 after a drain; a second signal ends the process at once.

    Raises:
        CarpoolError: Redis cannot be used, or the model cannot be served.
    """
    configure_logging(settings)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    executor = ModelExecutor(settings, inbox.put)
    executor.start()
    try:
        # Celery's imports take a second that the model's own can use
        from worker.serve import serve

        return serve(settings, name, executor, inbox)
    finally:
        executor.close(_CLOSE_S)
