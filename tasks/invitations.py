"""The Celery message of an invitation, as a text that the ledger's scripts complete and put into the broker's list.

A job is marked as invited and its message sent in one step, so that no process can die between the two, and the first
token does not wait for a second call. A message may still be lost or doubled later on: claims decide.
"""

from __future__ import annotations

from typing import Any, Final

import kombu
from celery import Celery
from kombu.utils.json import dumps

from tasks import entries, keys

#: Header of an invitation: without the job's record it is dropped, where a plain task would be accepted.
INVITATION_HEADER: Final = "carpool_invitation"

# What a script puts in, by name (`send_message` in tasks/lua/invitations.lua).
_ID: Final = "@id@"
_QUEUE: Final = "@queue@"
_TAG: Final = "@tag@"


def invitation_template(celery: Celery, task_name: str = keys.TASK_NAME) -> str:
    """The message that `send_task` would send, as kombu's virtual transports keep it, for no job in particular.

    Celery and kombu make it themselves, for kombu's transport in memory, so that it follows their releases.
    """
    task = celery.amqp.as_task_v2(_ID, task_name, (), {}, argsrepr="()", kwargsrepr="{}", ignore_result=True)
    with kombu.Connection("memory://") as connection:
        connection.Producer(serializer="json").publish(
            task.body,
            exchange="",
            routing_key=_QUEUE,
            headers={**task.headers, INVITATION_HEADER: entries.VERSION},
            **task.properties,
        )
        channel: Any = connection.default_channel  # its stubs lack what a transport is made of
        message: dict[str, Any] = channel._get(_QUEUE)
    message["properties"]["delivery_tag"] = _TAG
    return str(dumps(message))
