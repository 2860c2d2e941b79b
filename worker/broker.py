"""The Redis transport with a gate: a worker asks the broker for messages only while it could claim a job.

Celery's prefetch count bounds the unacknowledged messages of one connection. After a reconnect, or while the model
loads, that is not enough: the slots are the truth, so kombu is asked to look at them too.
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

import structlog
from kombu.asynchronous import get_event_loop
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps
from redis.exceptions import OutOfMemoryError

from tasks.broker import CarpoolChannel
from tasks.invitations import INVITATION_HEADER

_log = structlog.get_logger("carpool.broker")

#: Name of the transport option that holds the gate: a function without arguments that says whether to consume.
GATE_OPTION = "carpool_gate"


_NOTE_DELIVERY = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])"""


class GatedQoS(kombu_redis.QoS):
    """Prefetch bound and gate together."""

    def can_consume(self) -> bool:
        if not super().can_consume():
            return False
        channel: Any = self.channel
        # Remote control comes on a channel of its own, which must stay open: kombu leaves a closed one's socket unread,
        # so that a full worker would hear no revoke, and its event loop would spin on the socket.
        if not channel.active_queues:
            return True
        gate = channel.connection.client.transport_options.get(GATE_OPTION)
        return gate is None or bool(gate())

    def append(self, message: Any, delivery_tag: str) -> None:
        hub = get_event_loop()
        if hub is None or INVITATION_HEADER not in (message.headers or {}):
            self._record(message, delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
            return
        # An invitation is recorded once it is handed on, so that the first token does not wait for it. Lost in between
        # it is sent again, as one that is lost between its pop and its record; a plain task would be lost for good.
        virtual.QoS.append(self, message, delivery_tag)
        hub.call_soon(self._record_if_kept, message, delivery_tag)

    def _record_if_kept(self, message: Any, delivery_tag: str) -> None:
        qos: Any = self
        if delivery_tag in qos._delivered and delivery_tag not in qos._dirty:
            self._record(message, delivery_tag)

    def _record(self, message: Any, delivery_tag: str) -> None:
        # As kombu does it, but also where memory is used up: refused here, a message that is popped already would be
        # lost, and the error would end the worker.
        qos: Any = self
        delivery = message.delivery_info
        kept = dumps([message._raw, delivery["exchange"], delivery["routing_key"]])
        with qos.channel.conn_or_acquire() as client:
            client.eval(_NOTE_DELIVERY, 2, qos.unacked_index_key, qos.unacked_key, delivery_tag, time.time(), kept)

    def restore_visible(self, *arguments: Any, **options: Any) -> None:
        try:
            super().restore_visible(*arguments, **options)
        except OutOfMemoryError as error:
            # what dead workers had taken waits for room; the ledger invites anew in any case
            _log.debug("unacknowledged_not_restored", error=str(error))


class ClosingChannel(CarpoolChannel):
    """A channel that is closed at the first try, also where Redis has gone."""

    def close(self) -> None:
        # kombu first reads the answer to a blocking pop. Where that fails it leaves the channel half closed; a second
        # close, after its transport has gone, raises what ends the worker, with everything that rides.
        channel: Any = self  # its stubs lack what a transport is made of
        if channel._in_poll:
            channel._closing = True
            try:
                channel._brpop_read()
            except (Empty, *channel.connection_errors) as error:
                _log.debug("pop_unread_at_close", error=repr(error))
        super().close()


class GatedChannel(ClosingChannel):
    QoS = GatedQoS


class GatedTransport(kombu_redis.Transport):
    Channel = GatedChannel


class GatedSentinelChannel(ClosingChannel, kombu_redis.SentinelChannel):
    QoS = GatedQoS


class GatedSentinelTransport(kombu_redis.SentinelTransport):
    Channel = GatedSentinelChannel


def use_gate(conf: Any, gate: Any) -> None:
    """Make a Celery configuration consume through the gate."""
    scheme = str(conf.broker_url).split("://", 1)[0]
    conf.broker_transport = f"worker.broker:{'GatedSentinelTransport' if scheme == 'sentinel' else 'GatedTransport'}"
    conf.broker_transport_options = {**conf.broker_transport_options, GATE_OPTION: gate}
