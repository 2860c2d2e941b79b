"""Waiting for the end of a job without holding a connection of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from fastapi import Request
from redis.exceptions import RedisError

from api.caller import caller_of
from api.ending import end_tasks
from api.errors import ClientLeft
from api.feed import Feed
from api.service import Service

#: Between two looks while Redis is away; a new subscription wakes the wait at once.
_RETRY_S: Final = 1.0


def has_ended(view: dict[str, Any]) -> bool:
    """Whether a job's object is final."""
    return view["status"] not in ("queued", "running")


async def wait_for_end(service: Service, request: Request, feed: Feed, timeout_s: float) -> dict[str, Any] | None:
    """The object of the feed's one job once it has ended; None after `timeout_s`, or when this server stops.

    Raises:
        ClientLeft: the client has gone.
        CarpoolError: "job_not_found": the record has expired meanwhile; "invalid_api_key": the caller's was revoked.
    """
    id = feed.ids[0]
    caller = caller_of(request)
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    gone = asyncio.create_task(_until_disconnect(request, feed.wake))
    must_look = False
    try:
        while True:
            # a marker is no end, but anything that was published or lost is a reason to look
            must_look = must_look or bool(feed.lost) or any(entry.kind == "end" for _, entry in feed.entries)
            feed.lost.clear()
            feed.entries.clear()
            if must_look:
                try:
                    view = await service.view(id)
                except RedisError:
                    pass  # it goes on when Redis is back
                else:
                    if has_ended(view):
                        return view
                    must_look = False
            if gone.done():
                raise ClientLeft
            service.keyring.check(caller)
            left_s = until - loop.time()
            if left_s <= 0 or service.stopping.is_set():
                return None
            await feed.wait(min(left_s, _RETRY_S) if must_look else left_s)
    finally:
        await end_tasks([gone])


async def _until_disconnect(request: Request, wake: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    wake()
