"""The Redis transport with a gate: a worker asks the broker for messages only while it could claim a job.

Celery's prefetch count bounds the unacknowledged messages of one connection. After a reconnect, or while the model
loads, that is not enough: the slots are the truth, so kombu is asked to look at them too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import structlog
from kombu.asynchronous import get_event_loop
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads
from redis.exceptions import OutOfMemoryError

from tasks.broker import CarpoolChannel
from tasks.invitations import INVITATION_HEADER

_log = structlog.get_logger("carpool.broker")

#: Name of the transport option that holds the gate: a function without arguments that says how many jobs there is room
#: for.
GATE_OPTION = "carpool_gate"

#: Notes messages as unacknowledged, as kombu does, and takes further ones from a queue: up to ARGV[1] of those that
#: hold ARGV[2]. Behind these come time, tag and text of each message to be noted.
_NOTE_AND_TAKE = """#!lua flags=allow-oom
for at = 3, #ARGV, 3 do
  redis.call('ZADD', KEYS[1], ARGV[at], ARGV[at + 1])
  redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2])
end
local taken = {}
for _ = 1, tonumber(ARGV[1]) do
  local last = redis.call('LINDEX', KEYS[3], -1)
  if not last or not string.find(last, ARGV[2], 1, true) then break end
  taken[#taken + 1] = redis.call('RPOP', KEYS[3])
end
return taken"""


class GatedQoS(kombu_redis.QoS):
    """Prefetch bound and gate together; invitations that come at once are taken at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unrecorded: list[tuple[Any, str]] = []
        self._is_recording = False

    def can_consume(self) -> bool:
        if not super().can_consume():
            return False
        channel: Any = self.channel
        # Remote control comes on a channel of its own, which must stay open: kombu leaves a closed one's socket unread,
        # so that a full worker would hear no revoke, and its event loop would spin on the socket.
        if not channel.active_queues:
            return True
        gate = self._gate()
        return gate is None or gate() > 0

    def _gate(self) -> Callable[[], int] | None:
        channel: Any = self.channel
        gate: Callable[[], int] | None = channel.connection.client.transport_options.get(GATE_OPTION)
        return gate

    def append(self, message: Any, delivery_tag: str) -> None:
        hub = get_event_loop()
        if hub is None or INVITATION_HEADER not in (message.headers or {}):
            self._record(message, delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
            return
        # An invitation is recorded once it is handed on, so that the first token does not wait for it. Lost in between
        # it is sent again, as one that is lost between its pop and its record; a plain task would be lost for good.
        virtual.QoS.append(self, message, delivery_tag)
        self._unrecorded.append((message, delivery_tag))
        if not self._is_recording:
            self._is_recording = True
            hub.call_soon(self._record_and_take)

    def _record_and_take(self) -> None:
        """Record what was handed on, and hand on what else is waiting: two calls for a burst, not two a message."""
        qos: Any = self
        try:
            while self._unrecorded:
                handed_on, self._unrecorded = self._unrecorded, []
                kept = [one for one in handed_on if one[1] in qos._delivered and one[1] not in qos._dirty]
                queue = str(handed_on[-1][0].delivery_info["routing_key"])
                room = self._room(queue)
                if not kept and not room:
                    return
                for text in self._note(kept, queue, room):
                    qos.channel.connection._deliver(loads(text), queue)
        finally:
            self._is_recording = False

    def _room(self, queue: str) -> int:
        """How many messages may be taken of a queue now."""
        channel: Any = self.channel
        if queue not in channel.active_queues or not self.can_consume():
            return 0
        # The pop that is on its way may bring one more.
        room = (self.can_consume_max_estimate() or 0) - bool(channel._in_poll)
        gate = self._gate()
        return max(0, room if gate is None else min(room, gate()))

    def _record(self, message: Any, delivery_tag: str) -> None:
        # As kombu does it, but also where memory is used up: refused here, a message that is popped already would be
        # lost, and the error would end the worker.
        self._note([(message, delivery_tag)], "", 0)

    def _note(self, messages: Sequence[tuple[Any, str]], queue: str, room: int) -> list[str]:
        qos: Any = self
        arguments: list[Any] = [room, INVITATION_HEADER]
        for message, tag in messages:
            delivery = message.delivery_info
            kept = dumps([message._raw, delivery["exchange"], delivery["routing_key"]])
            arguments += [time.time(), tag, kept]
        keys = (qos.unacked_index_key, qos.unacked_key, queue)
        with qos.channel.conn_or_acquire() as client:
            taken: list[str | bytes] = client.eval(_NOTE_AND_TAKE, len(keys), *keys, *arguments)
        return [str(bytes_to_str(text)) for text in taken]

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


def use_gate(conf: Any, gate: Callable[[], int]) -> None:
    """Make a Celery configuration consume through the gate."""
    conf.broker_transport = "worker.broker:GatedTransport"
    conf.broker_transport_options = {**conf.broker_transport_options, GATE_OPTION: gate}
