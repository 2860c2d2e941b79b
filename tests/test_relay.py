"""The relay: one connection for all followers, which loses nothing whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis

from api.feed import Feed
from api.relay import Relay
from tasks import keys
from tasks.codes import CarpoolError
from tasks.entries import encode_tokens
from tasks.ledger import AsyncLedger
from tasks.ledger_types import JobState
from tasks.redis_clients import connect_async
from tasks.settings import Settings
from tests.redis_server import RedisServer

BOUND_S = 10.0


class Harness:
    """A relay with a server to publish on."""

    def __init__(self, settings: Settings, relay: Relay, publisher: redis.Redis) -> None:
        self.settings = settings
        self.relay = relay
        self.publisher = publisher

    def publish(self, id: str, n: int) -> int:
        """Publish token n of a job; returns how many connections got it."""
        return int(self.publisher.publish(keys.channel(0, id), encode_tokens(n, [n], [f"t{n}"])))


@pytest.fixture
async def harness(redis_url: str, redis_client: redis.Redis) -> AsyncIterator[Harness]:
    settings = Settings(redis_url=redis_url, stream_queue=8)
    client = connect_async(settings)
    ledger = AsyncLedger(client, settings)

    async def look(ids: object) -> list[JobState | None]:
        return await ledger.run(ledger.calls.look(list(ids)))  # type: ignore[call-overload]

    relay = Relay(settings, look)
    relay.start()
    yield Harness(settings, relay, redis_client)
    await relay.close()
    await client.aclose()


async def heard(feed: Feed, condition: Callable[[], bool]) -> None:
    """Wait for a feed until something is true of it."""
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await feed.wait(BOUND_S)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that tells nobody."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_feed_is_subscribed_when_it_is_handed_out(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        assert harness.publish("a", 1) == 1
        await heard(feed, lambda: bool(feed.entries))
        assert feed.entries[0][1].text == ("t1",)


async def test_the_first_confirmation_asks_for_a_read_of_the_log(harness: Harness) -> None:
    with await harness.relay.follow(["a", "b"]) as feed:
        assert feed.lost == {0, 1}


async def test_all_followers_of_a_job_share_one_subscription(harness: Harness) -> None:
    feeds = [await harness.relay.follow(["a"]) for _ in range(5)]
    assert harness.publish("a", 1) == 1
    for feed in feeds:
        await heard(feed, lambda feed=feed: bool(feed.entries))  # type: ignore[misc]
        feed.close()
    await until(lambda: not harness.publisher.pubsub_channels())


async def test_a_job_that_is_left_and_followed_again_at_once_is_heard(harness: Harness) -> None:
    for n in range(1, 200):
        with await harness.relay.follow(["a"]) as feed:
            assert harness.publish("a", n) == 1
            await heard(feed, lambda: bool(feed.entries))
    assert harness.relay.num_channels == 0
    await until(lambda: not harness.publisher.pubsub_channels())


async def test_a_feed_that_overflows_keeps_nothing_and_asks_for_the_log(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        feed.lost.clear()
        for n in range(1, 10):
            harness.publish("a", n)
        await heard(feed, lambda: bool(feed.lost))
        assert len(feed.entries) == 0


async def test_a_feed_for_ends_alone_is_not_filled_with_tokens(harness: Harness) -> None:
    with await harness.relay.follow(["a"], ends_only=True) as feed:
        feed.lost.clear()
        for n in range(1, 20):
            harness.publish("a", n)
        harness.publisher.publish(keys.channel(0, "a"), '{"v":1,"t":"end","n":19,"ids":[],"text":[""]}')
        await heard(feed, lambda: bool(feed.entries))
        assert [entry.kind for _, entry in feed.entries] == ["end"]
        assert not feed.lost


async def test_a_connection_that_is_killed_comes_back_and_everybody_reads_the_log_again(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        for _ in range(3):
            feed.lost.clear()
            harness.publisher.client_kill_filter(_type="pubsub")
            await heard(feed, lambda: bool(feed.lost))
            await until(lambda: bool(harness.publisher.pubsub_channels()))
        feed.entries.clear()
        assert harness.publish("a", 7) == 1
        await heard(feed, lambda: bool(feed.entries))


async def test_a_reader_that_crashes_is_started_again(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        feed.lost.clear()
        (reader,) = [task for task in asyncio.all_tasks() if task.get_name() == "carpool-relay"]
        reader.cancel()
        await heard(feed, lambda: bool(feed.lost))
        # the old connection may still count as a subscriber
        await until(lambda: harness.publish("a", 1) >= 0 and bool(feed.entries))


async def test_an_entry_that_cannot_be_read_sends_to_the_log_and_ends_nothing(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        for data in ("no json", "[]", '{"v":99,"t":"tokens","n":1}', '{"v":1}'):
            feed.lost.clear()
            harness.publisher.publish(keys.channel(0, "a"), data)
            await heard(feed, lambda: bool(feed.lost))
        harness.publish("a", 1)
        await heard(feed, lambda: bool(feed.entries))


async def test_silence_is_no_error(harness: Harness) -> None:
    settings = harness.settings.model_copy(update={"redis_timeout_s": 0.2})
    relay = Relay(settings, lambda ids: asyncio.sleep(0, [None] * len(ids)))
    relay.start()
    with await relay.follow(["a"]) as feed:
        ids = {client["id"] for client in harness.publisher.client_list(_type="pubsub")}
        await asyncio.sleep(5)  # longer than any timeout of the connection
        assert {client["id"] for client in harness.publisher.client_list(_type="pubsub")} == ids
        harness.publish("a", 1)
        await heard(feed, lambda: bool(feed.entries))
    await relay.close()


async def test_a_job_without_a_record_is_noticed_after_two_idle_seconds(harness: Harness) -> None:
    with await harness.relay.follow(["a"]) as feed:
        feed.lost.clear()
        await heard(feed, lambda: feed.gone == {0})
        assert feed.lost == {0}


async def test_idle_followers_are_checked_in_one_call(redis_url: str) -> None:
    calls: list[int] = []

    async def look(ids: object) -> list[JobState | None]:
        known = list(ids)  # type: ignore[call-overload]
        calls.append(len(known))
        return [JobState("running", 0, 1000, 0, True)] * len(known)

    relay = Relay(Settings(redis_url=redis_url), look)
    relay.start()
    feeds = [await relay.follow([str(number)]) for number in range(50)]
    await until(lambda: sum(calls) >= 50)
    assert len(calls) <= 2
    for feed in feeds:
        feed.close()
    await relay.close()


async def test_without_redis_nothing_is_followed(own_redis: RedisServer) -> None:
    own_redis.stop()
    settings = Settings(redis_url=own_redis.url, redis_timeout_s=0.2)
    relay = Relay(settings, lambda ids: asyncio.sleep(0, [None] * len(ids)))
    relay.start()
    started = time.monotonic()
    with pytest.raises(CarpoolError, match="Redis does not answer"):
        await relay.follow(["a"])
    assert time.monotonic() - started < 2
    assert relay.num_channels == 0
    own_redis.start()
    async with asyncio.timeout(BOUND_S):
        while relay.num_channels == 0:
            # between two tries to connect may lie more than this relay's patience of 0.4 s
            with contextlib.suppress(CarpoolError):
                await relay.follow(["a"])
    await relay.close()


async def test_a_frozen_server_is_left_for_a_new_connection(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url)
    relay = Relay(settings, lambda ids: asyncio.sleep(0, [None] * len(ids)))
    relay.start()
    with await relay.follow(["a"]) as feed:
        feed.lost.clear()
        own_redis.pause()
        await asyncio.sleep(4.5)  # a ping is sent after two idle seconds and given up after two more
        feed.lost.clear()
        own_redis.resume()
        await heard(feed, lambda: bool(feed.lost))
        with own_redis.client() as client:
            await until(lambda: client.publish(keys.channel(0, "a"), encode_tokens(1, [1], ["t1"])) >= 1)
        await heard(feed, lambda: bool(feed.entries))
    await relay.close()
