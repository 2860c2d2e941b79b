"""Celery messages for jobs that the ledger has marked as invited. A message may be lost or doubled: claims decide."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery

from tasks import entries, keys
from tasks.broker import INVITATION_HEADER
from tasks.ledger_types import Invitation


def invite(celery: Celery, invitations: Sequence[Invitation]) -> None:
    """Send one message a job. Where the broker is away it raises; the next pump mends that.

    The message is the one that `send_task` would send, without its look at routes and bindings and without a
    subscription for the result, which the terminal script writes: half the time, on the way of every first token.

    Raises:
        OperationalError, RedisError: the broker does not answer.
    """
    with celery.producer_pool.acquire(block=True) as producer:
        for invitation in invitations:
            message = celery.amqp.as_task_v2(
                invitation.id, keys.TASK_NAME, (), {}, argsrepr="()", kwargsrepr="{}", ignore_result=True
            )
            producer.publish(
                message.body,
                exchange="",
                routing_key=keys.queue(invitation.pool),
                serializer="json",
                headers={**message.headers, INVITATION_HEADER: entries.VERSION},
                **message.properties,
            )
