"""One Pub/Sub connection for the whole API process, shared by all who follow a job.

The reader never waits for a client: each has a bounded feed, and one that overflows is told to read the log instead.
Pub/Sub loses messages whenever a connection breaks, so each confirmation of a subscription means "read the log again".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final

import redis.asyncio
import structlog
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from api.ending import end_tasks
from api.feed import Feed
from tasks import keys
from tasks.codes import CarpoolError
from tasks.entries import decode
from tasks.ledger_types import JobState
from tasks.redis_clients import database
from tasks.settings import Settings

_log = structlog.get_logger("carpool.relay")

Look = Callable[[Sequence[str]], Awaitable[list[JobState | None]]]

#: A feed that heard nothing for so long is checked against the record, all of them in one call.
IDLE_S: Final = 2.0
_LOOK_PAGE: Final = 200
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class _Channel:
    """The feeds of one job's channel, with the number that the job has in each feed."""

    feeds: dict[Feed, int] = field(default_factory=dict)


class Relay:
    """Hands what is published on jobs' channels to feeds.

    Args:
        look: asks the ledger how jobs stand.

    Attributes:
        is_connected: whether there is a connection that subscriptions can go out on.
    """

    def __init__(self, settings: Settings, look: Look) -> None:
        self._look = look
        self._db = database(settings.redis_url)
        self._timeout_s = settings.redis_timeout_s
        self._capacity = settings.stream_queue
        # no retries: a connection that broke is this class's to mend, since subscriptions went with it
        self._pool = redis.asyncio.ConnectionPool.from_url(
            settings.redis_url,
            decode_responses=True,
            protocol=2,
            socket_timeout=settings.redis_timeout_s,
            socket_connect_timeout=settings.redis_timeout_s,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
        )
        self._channels: dict[str, _Channel] = {}
        self._feeds: set[Feed] = set()
        self._subscribed: set[str] = set()
        self._unconfirmed: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._has_changes = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._failures = 0
        self.is_connected = False

    @property
    def num_channels(self) -> int:
        """Channels that somebody follows."""
        return len(self._channels)

    def start(self) -> None:
        self._start(self._run, "carpool-relay")
        self._start(self._check_idle, "carpool-relay-idle")

    async def close(self) -> None:
        """End the connection; feeds that are still open are woken and get nothing more."""
        self._closing = True
        await end_tasks(self._tasks)
        await self._pool.disconnect()
        self.wake_all()

    def wake_all(self) -> None:
        """Wake everybody who waits, to look for something else than entries."""
        for feed in self._feeds:
            feed.wake()

    def open(self, ids: Sequence[str], *, ends_only: bool = False) -> Feed:
        """Subscribe to these jobs. The confirmation has the feed read the log, as any later one. Close the feed.

        Args:
            ends_only: pass on only the ends, for who waits for a result.
        """
        feed = Feed(ids, self._capacity, ends_only=ends_only, on_close=self._leave)
        self._feeds.add(feed)
        feed.seen_at = asyncio.get_running_loop().time()
        for index, id in enumerate(ids):
            name = keys.channel(self._db, id)
            self._channels.setdefault(name, _Channel()).feeds[feed] = index
            if name in self._subscribed and not self._unconfirmed[name]:
                feed.confirmed(index)
            else:
                self._changed.add(name)
                self._has_changes.set()
        return feed

    async def follow(self, ids: Sequence[str], *, ends_only: bool = False) -> Feed:
        """The same, and wait for the confirmation.

        Raises:
            CarpoolError: "redis_unavailable" where none comes in time.
        """
        feed = self.open(ids, ends_only=ends_only)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await feed.subscribed.wait()
        except TimeoutError:
            feed.close()
            raise CarpoolError(
                "redis_unavailable", "Redis does not answer, so nothing was started. Try again", retry_after_s=1
            ) from None
        except BaseException:
            feed.close()
            raise
        return feed

    def _leave(self, feed: Feed) -> None:
        self._feeds.discard(feed)
        for id in feed.ids:
            name = keys.channel(self._db, id)
            channel = self._channels.get(name)
            if channel is not None and channel.feeds.pop(feed, None) is not None and not channel.feeds:
                del self._channels[name]
                self._changed.add(name)
                self._has_changes.set()

    def _start(self, run: Callable[[], Coroutine[None, None, None]], name: str) -> None:
        task = asyncio.create_task(run(), name=name)
        self._tasks = [other for other in self._tasks if not other.done()] + [task]
        task.add_done_callback(lambda ended: self._ended(ended, run, name))

    def _ended(self, task: asyncio.Task[None], run: Callable[[], Coroutine[None, None, None]], name: str) -> None:
        """A task of ours ended, which only `close` should do: start it again, so that no fault silences all streams."""
        if self._closing:
            return
        error = None if task.cancelled() else task.exception()
        _log.error("relay_task_died", task=name, exc_info=error)
        self._disconnected()
        self._start(run, name)

    async def _run(self) -> None:
        """Connections, one after the other."""
        while True:
            await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S)) - 1] if self._failures else 0)
            connection: AbstractConnection | None = None
            try:
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call] # theirs
                await self._serve(connection)
            except (RedisError, OSError) as error:
                if not self._failures:
                    _log.warning("relay_waits_for_redis", error=str(error))
                self._failures += 1
            finally:
                self._disconnected()
                if connection is not None:
                    await connection.disconnect(nowait=True)
                    await self._pool.release(connection)

    async def _serve(self, connection: AbstractConnection) -> None:
        self._changed = set(self._channels)
        self._has_changes.set()
        self.is_connected = True
        tasks = (asyncio.create_task(self._read(connection)), asyncio.create_task(self._write(connection)))
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(tasks)
        for task in ended:
            task.result()

    def _disconnected(self) -> None:
        self.is_connected = False
        self._subscribed.clear()
        self._unconfirmed.clear()
        for feed in self._feeds:
            feed.lose_all()

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            changed, self._changed = self._changed, set()
            join = [name for name in changed if name in self._channels and name not in self._subscribed]
            leave = [name for name in changed if name not in self._channels and name in self._subscribed]
            self._subscribed.update(join)
            self._subscribed.difference_update(leave)
            self._unconfirmed.update(join)
            if join:
                await connection.send_command("SUBSCRIBE", *join, check_health=False)
            if leave:
                await connection.send_command("UNSUBSCRIBE", *leave, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        pinged = False
        while True:
            message = await connection.read_response(timeout=IDLE_S, disconnect_on_error=False, push_request=True)
            if message is None:
                if pinged:
                    raise redis.exceptions.ConnectionError(f"no answer to a ping for {IDLE_S:g} s")
                pinged = True
                await connection.send_command("PING", check_health=False)
                continue
            pinged = False
            if not isinstance(message, list):
                continue  # the answer to a ping while nothing is subscribed
            kind, name = str(message[0]), str(message[1])
            if kind == "message":
                self._deliver(name, message[2])
            elif kind == "subscribe":
                self._confirm(name)
            self._failures = 0

    def _confirm(self, name: str) -> None:
        self._unconfirmed[name] -= 1
        if self._unconfirmed[name] > 0:
            return
        del self._unconfirmed[name]
        channel = self._channels.get(name)
        if channel is not None:
            for feed, index in channel.feeds.items():
                feed.confirmed(index)

    def _deliver(self, name: str, data: str) -> None:
        channel = self._channels.get(name)
        if channel is None:
            return
        try:
            entry = decode(data)
        except (ValueError, KeyError, TypeError) as error:
            # the log holds the same bytes: whoever reads them there reports the fault
            _log.error("unreadable_entry", channel=name, error=str(error))
            for feed, index in channel.feeds.items():
                feed.lose(index)
            return
        now = asyncio.get_running_loop().time()
        for feed, index in channel.feeds.items():
            feed.put(index, entry, now)

    async def _check_idle(self) -> None:
        """Compare the feeds that heard nothing with the records: a message may have been lost on the way."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(IDLE_S / 2)
            idle = [feed for feed in self._feeds if loop.time() - feed.seen_at >= IDLE_S]
            ids = list({id for feed in idle for id in feed.ids})
            states: dict[str, JobState | None] = {}
            try:
                for start in range(0, len(ids), _LOOK_PAGE):
                    page = ids[start : start + _LOOK_PAGE]
                    states.update(zip(page, await self._look(page), strict=True))
            except RedisError:
                continue  # the next subscription's confirmation has them all read the log
            for feed in idle:
                feed.checked(states, loop.time())
