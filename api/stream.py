"""One open event stream: live entries, the log where they are not enough, and comments while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, cast

import redis.asyncio
import structlog
from redis.exceptions import RedisError
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from api.events import Renderer, describe, render_comment
from api.feed import Feed
from api.follower import Follower, log_start
from api.relay import Look
from tasks import keys
from tasks.codes import CarpoolError
from tasks.entries import Entry, decode

_log = structlog.get_logger("carpool.stream")

_LOG_PAGE: Final = 512
#: Between two tries to read a log while Redis is away; a new subscription wakes the stream at once.
_RETRY_S: Final = 1.0
#: A client that takes nothing for so long is gone.
_SEND_TIMEOUT_S: Final = 60.0


async def read_log(client: redis.asyncio.Redis, id: str, have: int) -> AsyncIterator[list[Entry]]:
    """The log of a job behind token `have`, page by page.

    Raises:
        RedisError: no answer.
        ValueError: an entry that this release does not understand.
    """
    start = log_start(have)
    while True:
        answer = await client.xrange(keys.log(id), start, "+", count=_LOG_PAGE)
        page = cast(list[tuple[str, dict[str, str]]], answer)
        if page:
            yield [decode(fields["d"]) for _, fields in page]
        if len(page) < _LOG_PAGE:
            return
        start = f"({page[-1][0]}"


class JobStream:
    """The events of the jobs of a feed, from their cursors to their ends.

    Args:
        followers: one per job of the feed.
        stopping: set when this server is to end; the stream then ends without an end event, for another to take up.
        check: raises CarpoolError where the client may follow no longer; asked whenever the feed wakes.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        look: Look,
        feed: Feed,
        followers: Sequence[Follower],
        renderer: Renderer,
        heartbeat_s: float,
        stopping: asyncio.Event,
        check: Callable[[], None],
    ) -> None:
        self._client = client
        self._look = look
        self._feed = feed
        self._followers = followers
        self._renderer = renderer
        self._heartbeat_s = heartbeat_s
        self._stopping = stopping
        self._check = check
        self._redis_is_away = False

    async def frames(self) -> AsyncIterator[bytes]:
        """The bytes to send, each item as many events as are there."""
        loop = asyncio.get_running_loop()
        comment_at = loop.time() + self._heartbeat_s
        if beginning := self._renderer.begin():
            yield beginning.encode()
        while True:
            try:
                self._check()
                async for frame in self._news():
                    yield frame
                    comment_at = loop.time() + self._heartbeat_s
            except CarpoolError as error:
                yield self._renderer.fault(error).encode()
                return
            if all(follower.ended for follower in self._followers):
                if last := self._renderer.finish():
                    yield last.encode()
                return
            if self._stopping.is_set():
                return
            silence_s = comment_at - loop.time()
            if await self._feed.wait(min(silence_s, _RETRY_S) if self._redis_is_away else silence_s):
                continue
            if loop.time() >= comment_at:
                yield render_comment(await self._describe()).encode()
                comment_at = loop.time() + self._heartbeat_s

    async def _news(self) -> AsyncIterator[bytes]:
        """Everything that can be passed on now."""
        feed, followers = self._feed, self._followers
        while not self._stopping.is_set():
            for index in feed.lost:
                followers[index].needs_log = True
            feed.lost.clear()
            for index, follower in enumerate(followers):
                if follower.needs_log and not follower.ended:
                    async for frame in self._logged(index):
                        yield frame
                    if self._redis_is_away:
                        return
            text = "".join(map(self._live, range(len(feed.entries))))
            if text:
                yield text.encode()
            if not feed.lost and not any(follower.needs_log and not follower.ended for follower in followers):
                return

    def _live(self, _: int) -> str:
        index, entry = self._feed.entries.popleft()
        follower = self._followers[index]
        new = follower.take_live(entry)
        self._feed.have[index] = follower.have
        return "" if new is None else self._renderer.render(index, new)

    async def _logged(self, index: int) -> AsyncIterator[bytes]:
        follower, id = self._followers[index], self._feed.ids[index]
        follower.start_reading()
        try:
            async for page in read_log(self._client, id, follower.have):
                new = [entry for entry in map(follower.take_logged, page) if entry is not None]
                self._feed.have[index] = follower.have
                if new:
                    yield "".join(self._renderer.render(index, entry) for entry in new).encode()
        except RedisError:
            follower.needs_log = True
            self._redis_is_away = True
            return
        except (ValueError, KeyError) as error:
            _log.error("log_cannot_be_read", job_id=id, error=str(error))
            raise CarpoolError("internal_error", f"the log of job {id} cannot be read: {error}", job_id=id) from error
        self._redis_is_away = False
        if index in self._feed.gone and not follower.ended and await self._is_gone(id):
            raise CarpoolError("job_not_found", f"the record of job {id} has expired or was deleted", job_id=id)

    async def _is_gone(self, id: str) -> bool:
        """What a feed was told may be from before the job was accepted."""
        try:
            return (await self._look([id]))[0] is None
        except RedisError:
            return False

    async def _describe(self) -> str:
        try:
            return describe(await self._look(self._feed.ids))
        except RedisError:
            return "Redis does not answer, this stream goes on when it is back"


class JobEvents(EventSourceResponse):
    """The response: ends when its jobs have ended, this server stops, or the client leaves.

    Args:
        on_end: called once with whether it was the client that left; never waited for.
    """

    def __init__(self, stream: JobStream, headers: dict[str, str], on_end: Callable[[bool], None]) -> None:
        self._client_left = False
        self._complete = False
        self._on_end = on_end
        super().__init__(
            self._frames(stream),
            headers={"Cache-Control": "no-store", **headers},
            ping=0,
            sep="\n",
            send_timeout=_SEND_TIMEOUT_S,
            client_close_handler_callable=self._closed,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._client_left = not self._complete
            _log.info("stream_client_takes_nothing", seconds=_SEND_TIMEOUT_S)
        finally:
            self._on_end(self._client_left)

    async def _frames(self, stream: JobStream) -> AsyncIterator[bytes]:
        async for frame in stream.frames():
            yield frame
        # from here on a disconnect is the ordinary end of the connection
        self._complete = True

    async def _closed(self, _: Message) -> None:
        self._client_left = not self._complete
