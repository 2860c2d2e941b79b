"""Entry of a generation worker: the model begins to load, and beside it everything else is imported and connected."""

from __future__ import annotations

import queue
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tasks.codes import CarpoolError
from tasks.logs import configure_logging
from tasks.settings import Settings
from worker.gpus import GpuError, count_as_listed, list_gpus, lock_gpu, needs_gpu, visible_gpus
from worker.model_executor import ModelExecutor

_CLOSE_S = 5.0


def run(settings: Settings, name: str) -> int:
    """Serve until drained (SIGTERM, SIGINT, the end of the supervisor). Returns the exit code.

    0 after a drain; a second signal ends the process at once.

    Raises:
        CarpoolError: Redis cannot be used, the model cannot be served, or another worker has its GPU.
    """
    configure_logging(settings, "worker", name)
    try:
        with _gpu_of(settings, name):
            return _run(settings, name)
    except GpuError as error:
        raise CarpoolError("no_worker", str(error)) from error


def _run(settings: Settings, name: str) -> int:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    executor = ModelExecutor(settings, inbox.put)
    executor.start()
    try:
        # Celery's imports take a second that the model's own can use
        from worker.serve import serve

        return serve(settings, name, executor, inbox)
    finally:
        executor.close(_CLOSE_S)


def _gpu_of(settings: Settings, name: str) -> AbstractContextManager[object]:
    """The lock of this worker's GPU: held here, so that it outlives each child and nothing outlives it."""
    if not needs_gpu(settings):
        return nullcontext()
    count_as_listed()
    return lock_gpu(settings, name, visible_gpus(list_gpus())) or nullcontext()
