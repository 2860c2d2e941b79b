"""The Celery side of a ride: acknowledgement, task states and events, so that Celery's tools tell the truth.

The engine's thread calls; what touches Celery's state runs on the consumer's event loop. The consumer is replaced at
every reconnect, so nothing of it is kept but through `CelerySide`, which the strategy points to the current one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery.worker import state as celery_state

from tasks.invitations import INVITATION_HEADER
from tasks.trace_context import trace_context


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message: an invitation to a job, or a whole task that was sent with plain Celery (`native`).

    `tag` is the message's delivery tag, by which kombu knows it as unacknowledged. `request` is Celery's Request; it is
    touched on the consumer's event loop only, but for `acknowledge`, which is made to be called from any thread.
    `payload` is the message's body: positional arguments, keyword arguments, and Celery's embedded options. `trace` is
    the trace that its sender put into the headers of a native one.
    """

    id: str
    tag: str
    native: bool
    request: Any
    payload: Any
    trace: str = ""


def delivery_of(request: Any, message: Any, payload: Any) -> Delivery:
    """A delivery for a request that was built from this message."""
    return Delivery(
        id=str(request.id),
        tag=str(message.delivery_tag),
        native=INVITATION_HEADER not in (message.headers or {}),
        request=request,
        payload=payload,
        trace=_trace_of(message.headers or {}),
    )


def _trace_of(headers: Mapping[str, Any]) -> str:
    traceparent, tracestate = headers.get("traceparent"), headers.get("tracestate")
    return trace_context(traceparent, str(tracestate or "")) if isinstance(traceparent, str) else ""


class CelerySide:
    """Tells Celery what becomes of deliveries."""

    def __init__(self) -> None:
        self._consumer: Any = None

    def attach(self, consumer: Any) -> None:
        """The consumer of a new connection takes the place of the old one."""
        self._consumer = consumer

    def wake(self) -> None:
        """Let the event loop look at the gate again."""
        self._on_loop(_nothing)

    def started(self, delivery: Delivery) -> None:
        """The job took a slot."""
        now = time.monotonic()
        self._on_loop(lambda: delivery.request.on_accepted(os.getpid(), now))

    def ended(self, delivery: Delivery, status: str, summary: str, runtime_s: float) -> None:
        """The job has ended in the ledger, which wrote Celery's result; now the acknowledgement and the event."""
        delivery.request.acknowledge()
        self._on_loop(lambda: self._report_end(delivery.request, status, summary, runtime_s))

    def given_up(self, delivery: Delivery) -> None:
        """The message is done with, whatever becomes of the job: not ours, known to another, or handed back."""
        delivery.request.acknowledge()
        self._on_loop(lambda: celery_state.task_ready(delivery.request))

    def _report_end(self, request: Any, status: str, summary: str, runtime_s: float) -> None:
        celery_state.task_ready(request, successful=status == "succeeded")
        if status == "succeeded":
            self._event("task-succeeded", request, result=summary, runtime=runtime_s)
        elif status == "cancelled":
            self._event("task-revoked", request, terminated=True, signum=None, expired=False)
        else:
            self._event("task-failed", request, exception=summary, traceback="")

    def _event(self, kind: str, request: Any, **fields: Any) -> None:
        dispatcher = self._consumer.event_dispatcher
        if dispatcher and dispatcher.enabled:
            dispatcher.send(kind, uuid=request.id, **fields)

    def _on_loop(self, action: Callable[[], None]) -> None:
        consumer = self._consumer
        if consumer is not None and consumer.hub is not None:
            consumer.hub.call_soon(action)


def _nothing() -> None:
    """A callback whose only effect is that the event loop turns."""
