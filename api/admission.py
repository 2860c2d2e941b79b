"""What a client is told of the queue: how full it is, in OpenAI's rate limit headers, and why it takes no more."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.rate_headers import rate_headers
from tasks.codes import CarpoolError
from tasks.ledger_types import Acceptance, Accepted, QueueNumbers
from tasks.settings import Settings

#: Nobody is sent away for longer: what is known of the queue's speed is not known for longer.
MOST_RETRY_S: Final = 120
#: Where nobody can tell how fast the queue moves: no worker is ready, or none has ended a job yet.
_UNKNOWN_RETRY_S: Final = 10
_TOO_LATE: Final = ("late", "too_long")

_headers: ContextVar[dict[str, str] | None] = ContextVar("carpool_queue_headers", default=None)


class QueueHeaders:
    """Puts what the request's acceptance said of the queue on its answer, also where that is an error.

    What is left of an API key's minute is set over it, further out (api/access.py).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found: dict[str, str] = {}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and found:
                headers = MutableHeaders(scope=message)
                for name, value in found.items():
                    headers.setdefault(name, value)
            await send(message)

        token = _headers.set(found)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _headers.reset(token)


def note_queue(request: Acceptance, queue: QueueNumbers, settings: Settings) -> None:
    """Have the answer to the present request say how full the queue is: its owner's part where that has a cap."""
    found = _headers.get()
    if found is None:
        return  # nobody asks: a line of a batch
    caps = (
        ("requests", request.most_jobs, queue.own_jobs, settings.max_queued_jobs, queue.jobs),
        ("tokens", request.most_tokens, queue.own_tokens, settings.max_queued_tokens, queue.tokens),
    )
    for of, own_most, own, most, waiting in caps:
        limit, used, reset_ms = (own_most, own, queue.own_drain_ms) if own_most else (most, waiting, queue.drain_ms)
        if reset_ms is None:
            reset_ms = 1000 * MOST_RETRY_S  # nobody knows: the longest pause
        if limit:
            found.update(rate_headers(of, limit, max(0, limit - used), reset_ms))


def check_admitted(request: Acceptance, accepted: Accepted, settings: Settings) -> None:
    """Raises CarpoolError where the ledger has refused the request."""
    queue = accepted.queue
    kind, _, unit = accepted.verdict.rpartition("_")
    if queue is None or (kind not in ("own_full", "full", "never_fits") and accepted.verdict not in _TOO_LATE):
        return
    retry_s = _retry_s(queue.room_ms)
    if accepted.verdict in _TOO_LATE:
        raise _too_late(request, queue, retry_s, alone=accepted.verdict == "too_long")
    more = len(request.jobs)
    if unit == "tokens":
        more = sum(job.prompt_tokens + request.max_tokens for job in request.jobs)
    own_most = request.most_jobs if unit == "jobs" else request.most_tokens
    most = settings.max_queued_jobs if unit == "jobs" else settings.max_queued_tokens
    setting = f"CARPOOL_MAX_QUEUED_{unit.upper()}"
    if kind == "never_fits":
        least = min(filter(None, (own_most, most)))
        if least == own_most:
            setting += "_PER_KEY"
        advice = "Ask for fewer in one request" if unit == "jobs" else "Ask for a smaller max_tokens"
        raise CarpoolError(
            "larger_than_queue",
            f"this request alone has {more} {unit}, and at most {least} may wait ({setting}). {advice}",
            param=None if unit == "jobs" else "max_tokens",
        )
    if kind == "own_full":
        own = queue.own_jobs if unit == "jobs" else queue.own_tokens
        raise CarpoolError(
            "too_many_queued",
            f"{own} {unit} of this key wait, {more} more are asked for, and at most {own_most} may wait "
            f"({setting}_PER_KEY). Try again in {retry_s} s",
            retry_after_s=retry_s,
        )
    waiting = queue.jobs if unit == "jobs" else queue.tokens
    raise CarpoolError(
        "queue_full",
        f"the queue is full: {waiting} {unit} wait, {more} more are asked for, and at most {most} may wait "
        f"({setting}). Try again in {retry_s} s",
        retry_after_s=retry_s,
    )


def _too_late(request: Acceptance, queue: QueueNumbers, retry_s: int, *, alone: bool) -> CarpoolError:
    """It would not be done by its deadline; `alone`: nor if nothing else waited, so that to wait is of no use."""
    eta_s = (queue.eta_ms or 0) / 1000
    if alone:
        what = f"by itself it takes about {eta_s:.0f} s"
        advice = "Give it a later deadline_s, or a smaller max_tokens"
    else:
        what = f"it would be done in about {eta_s:.0f} s"
        advice = f"Give it a later deadline_s, or try again in {retry_s} s"
    return CarpoolError(
        "would_be_late",
        f"{what}, and its deadline is in {request.deadline_s:g} s, so that it was not accepted (CARPOOL_REFUSE_LATE). "
        f"{advice}",
        param="deadline_s",
        retry_after_s=MOST_RETRY_S if alone else retry_s,
        is_final=alone,
    )


def _retry_s(room_ms: int | None) -> int:
    """Whole seconds after which there is room, by what is known now."""
    return _UNKNOWN_RETRY_S if room_ms is None else min(MOST_RETRY_S, max(1, math.ceil(room_ms / 1000)))
