"""Celery's strategy for `carpool.generate`: each message goes to the LLM engine the moment it arrives.

Celery builds the strategy anew at every connection, so it holds nothing of the consumer beyond its own life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery import signals
from celery.app.task import Task
from celery.exceptions import InvalidTaskError
from celery.utils.imports import symbol_by_name
from celery.worker.request import create_request_cls  # type: ignore[attr-defined] # its stubs lack it
from celery.worker.state import task_reserved
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2  # type: ignore[attr-defined] # likewise

from worker.delivery import delivery_of


def strategy(task: Task[..., Any], app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """The handler of one connection's messages. `app` is a `tasks.app.CarpoolCelery` whose engine runs."""
    engine = app.llm_engine
    if engine is None:
        raise RuntimeError("carpool.generate needs Carpool's own worker. Start one: carpool worker")
    engine.celery_side.attach(consumer)
    eventer = consumer.event_dispatcher
    request_class = create_request_cls(
        symbol_by_name(task.Request), task, consumer.pool, consumer.hostname, eventer, app=app
    )

    def build(message: Any, body: Any, ack: Any, reject: Any) -> tuple[Any, Any]:
        """Celery's request for a message, and the message's payload."""
        headers, decoded, utc = message.headers, False, app.uses_utc_timezone()
        if body is None and "args" not in message.payload:
            body = message.body
        elif "args" in message.payload:
            body, headers, decoded, utc = hybrid_to_proto2(message, message.payload)
        else:
            body, headers, decoded, utc = proto1_to_proto2(message, body)
        request = request_class(
            message,
            on_ack=ack,
            on_reject=reject,
            app=app,
            hostname=consumer.hostname,
            eventer=eventer,
            task=task,
            connection_errors=consumer.connection_errors,
            body=body,
            headers=headers,
            decoded=decoded,
            utc=utc,
        )
        return request, body if decoded else message.payload

    def handle(message: Any, body: Any, ack: Any, reject: Any, callbacks: Sequence[Callable[[Any], None]]) -> None:
        try:
            request, payload = build(message, body, ack, reject)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # whoever may write to the broker could end the worker with it; so Celery drops the message and says so
            raise InvalidTaskError(f"the message is no task: {error}") from error
        task_reserved(request)
        # first, so that the claim does not wait for the event; "task-started" comes through this thread, after it
        engine.offer(delivery_of(request, message, payload))
        signals.task_received.send(sender=consumer, request=request)
        if eventer and eventer.enabled:
            eventer.send(
                "task-received",
                uuid=request.id,
                name=request.name,
                # a prompt is nobody's business but its owner's
                args="()",
                kwargs="{…}",
                root_id=request.root_id,
                parent_id=request.parent_id,
                retries=0,
                eta=None,
                expires=None,
            )
        for callback in callbacks:
            callback(request)

    return handle
