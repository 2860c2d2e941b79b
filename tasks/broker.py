"""The Redis transport, for every process that talks to the broker: a server whose memory is full lets it in."""

from __future__ import annotations

from typing import Any

import redis
import structlog
from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError, OutOfMemoryError, ResponseError

from tasks.redis_clients import takes_no_writes

_log = structlog.get_logger("carpool.broker")


class _Patient(redis.connection.AbstractConnection):
    """A connection that is lost where the server takes no writes: Celery waits for one that is lost, and would end the
    worker, with everything that rides, over an answer that it does not know.
    """

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)
        except ResponseError as error:
            if not takes_no_writes(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise ConnectionError(f"the server takes no writes now: {error}") from error


class _Connection(_Patient, redis.Connection):
    pass


class _SslConnection(_Patient, redis.SSLConnection):
    pass


class CarpoolChannel(kombu_redis.Channel):
    """A channel that opens also where memory is used up: else no worker could take the jobs that would make room."""

    connection_class: Any = _Connection
    connection_class_ssl: Any = _SslConnection

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)  # type: ignore[misc] # its stubs lack it
        except OutOfMemoryError as error:
            # only the exchange's table is not written, and our messages name their queue
            _log.debug("binding_not_written", queue=queue, error=str(error))


class CarpoolTransport(kombu_redis.Transport):
    """Celery finds it by its name (`celery_config`)."""

    Channel = CarpoolChannel
