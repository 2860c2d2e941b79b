"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_S: Final = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended; their results and errors are dropped.

    Once is not enough: up to Python 3.11, `asyncio.wait_for`, in which redis-py sends its commands, swallows a
    cancellation that meets the end of what it waits for (cpython issue 86296).
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # else asyncio logs an error that nobody asked for
