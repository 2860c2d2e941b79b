"""Celery messages for jobs that the ledger has marked as invited. A message may be lost or doubled: claims decide."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery

from tasks import entries, keys
from tasks.ledger import Invitation

#: Header of an invitation: without the job's record it is dropped, where a plain task would be accepted.
HEADER = "carpool_invitation"


def invite(celery: Celery, invitations: Sequence[Invitation]) -> None:
    """Send one message a job. Raises kombu's OperationalError where the broker is away; the next pump mends that."""
    with celery.producer_pool.acquire(block=True) as producer:
        for invitation in invitations:
            celery.send_task(
                keys.TASK_NAME,
                task_id=invitation.id,
                queue=keys.queue(invitation.pool),
                headers={HEADER: entries.VERSION},
                # the terminal script writes the result; a subscription a job would pile up here
                ignore_result=True,
                producer=producer,
                retry=False,
            )
