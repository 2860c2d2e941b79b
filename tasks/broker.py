"""The Redis transport for those who send invitations: a full Redis takes them, as it takes the ends of jobs.

Its memory is full of accepted jobs. If their invitations were refused too, none of them could ever make room.
"""

from __future__ import annotations

from typing import Any

import structlog
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from redis.exceptions import OutOfMemoryError

from tasks.redis_clients import write_even_when_full

_log = structlog.get_logger("carpool.broker")
#: Header of an invitation: without the job's record it is dropped, where a plain task would be accepted.
INVITATION_HEADER = "carpool_invitation"


class InvitingChannel(kombu_redis.Channel):
    """A channel that puts invitations even where memory is used up. Plain tasks are new jobs and are refused then."""

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        channel: Any = self  # the stubs lack what a transport is made of
        if INVITATION_HEADER not in message["headers"]:
            super()._put(queue, message, **options)
            return
        priority = channel._get_message_priority(message, reverse=False)
        with channel.conn_or_acquire() as client:
            write_even_when_full(client, "LPUSH", channel._q_for_pri(queue, priority), dumps(message))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)  # type: ignore[misc] # its stubs lack it
        except OutOfMemoryError as error:
            # only the exchange's table is not written, and our messages name their queue
            _log.debug("binding_not_written", queue=queue, error=str(error))


class InvitingTransport(kombu_redis.Transport):
    Channel = InvitingChannel


class InvitingSentinelChannel(InvitingChannel, kombu_redis.SentinelChannel):
    pass


class InvitingSentinelTransport(kombu_redis.SentinelTransport):
    Channel = InvitingSentinelChannel


def transport_for(url: str) -> str:
    """Name of the transport for a broker URL, for Celery's `broker_transport`."""
    is_sentinel = url.split("://", 1)[0] == "sentinel"
    return f"tasks.broker:{'InvitingSentinelTransport' if is_sentinel else 'InvitingTransport'}"
