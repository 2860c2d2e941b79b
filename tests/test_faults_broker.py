"""Messages are lost, doubled and come late; a subscriber is too slow. The ledger decides, and nobody misses a token."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tasks import keys
from tests.api_server import running_api, tokens_of
from tests.redis_server import RedisServer
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(180)

SHORT = {"lease_s": 2, "renew_s": 0.5, "grace_s": 0.5, "reaper_tick_s": 0.3, "heartbeat_s": 0.5}


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=20, **SHORT) as service:
        yield service


def test_messages_that_the_broker_lost_are_sent_again(service: Service) -> None:
    service.worker(max_batch_size=1)
    riding = service.submit("riding", max_tokens=60)
    service.wait_for_token(riding, 1)
    waiting = [service.submit(f"waiting {i}", max_tokens=10) for i in range(4)]
    queue = keys.queue(service.settings.pool)
    eventually("messages lie in the broker", lambda: service.client.llen(queue))
    assert service.client.delete(queue)
    for i, job in enumerate(waiting):
        assert service.wait_for_end(job)["text"] == simulated_text(f"waiting {i}", 7, 10)
        assert service.view(job)["attempts"] == 1


def test_a_message_that_is_delivered_again_and_again_makes_nobody_ride_twice(service: Service) -> None:
    service.worker("worker-1")
    service.worker("worker-2")
    jobs = [service.submit(f"number {i}", max_tokens=100) for i in range(6)]
    for job in jobs:
        service.wait_for_token(job, 3)
    queue = keys.queue(service.settings.pool)
    for _ in range(10):
        # kombu keeps [message, exchange, routing key] of what is not acknowledged
        kept: Any = service.client.hvals(keys.UNACKED)
        copies = [json.dumps(json.loads(one)[0]) for one in kept]
        assert copies
        service.client.rpush(queue, *copies)
        service.client.lpush(queue, *copies)
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert view["text"] == simulated_text(f"number {i}", 7, 100)
        assert view["attempts"] == 1
        service.assert_whole(job)
    eventually("no slot is taken", lambda: service.riding() == 0)
    eventually("no message is left", lambda: not service.client.llen(queue) and not service.client.hlen(keys.UNACKED))


def test_a_visibility_timeout_redelivers_nothing_that_rides(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path, simulated_step_ms=20, visibility_s=3, **SHORT) as service:
        service.worker("worker-1")
        service.worker("worker-2")
        job = service.submit("long", max_tokens=400)
        service.wait_for_token(job, 1)
        with service.celery.connection() as connection:
            channel: Any = connection.channel()
            while service.view(job)["status"] == "running":
                channel.qos.restore_visible(interval=1)
        assert service.wait_for_end(job)["text"] == simulated_text("long", 7, 400)
        assert service.view(job)["attempts"] == 1
        service.assert_whole(job)


def test_a_subscriber_that_redis_cut_off_for_its_slowness_misses_no_token(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    with (
        own_redis.client() as redis,
        Service(own_redis.url, tmp_path, simulated_step_ms=0, sse_heartbeat_s=1) as service,
        running_api(service.settings) as api,
        api.client() as client,
    ):
        redis.config_set("client-output-buffer-limit", "pubsub 65536 0 0")
        service.worker(max_batch_size=8)
        jobs = [service.submit(f"fast {i}", max_tokens=8000) for i in range(8)]
        texts: dict[str, str] = {}

        def follow(job: str) -> None:
            with client.stream("GET", f"/jobs/{job}/stream", timeout=60) as response:
                events = tokens_of(response)
            assert [event.id for event in events] == [*map(str, range(1, 8001)), "8000.end"]
            texts[job] = "".join(event.data["token"] for event in events if event.data)

        followers = [threading.Thread(target=follow, args=(job,)) for job in jobs]
        for follower in followers:
            follower.start()
        eventually("all are followed", lambda: api.call(lambda: api.service.relay.num_channels) == len(jobs))
        awake = threading.Event()
        stalled = threading.Thread(target=api.call, args=(awake.wait, 60))
        stalled.start()

        def was_cut() -> bool:
            found: Any = redis.info("stats")
            return int(found["client_output_buffer_limit_disconnections"]) > 0

        eventually("Redis has cut it off", was_cut)
        awake.set()
        for thread in (*followers, stalled):
            thread.join(90)
        for i, job in enumerate(jobs):
            assert texts[job] == simulated_text(f"fast {i}", 7, 8000)


def test_a_burst_is_taken_with_a_few_calls_and_every_message_of_it_is_recorded(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path, max_batch_size=16, simulated_step_ms=20) as service:
        worker = service.worker()
        calls = _calls(service, "brpop") + _calls(service, "eval")
        worker.signal(signal.SIGSTOP)
        jobs = [service.submit(f"number {i}", max_tokens=100) for i in range(16)]
        worker.signal(signal.SIGCONT)
        for job in jobs:
            service.wait_for_token(job, 1)
        eventually("all are recorded", lambda: service.client.hlen(keys.UNACKED) == 16)
        taken = _calls(service, "brpop") + _calls(service, "eval") - calls

        for i, job in enumerate(jobs):
            assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 100)
        eventually("none is left", lambda: service.client.hlen(keys.UNACKED) == 0)
        assert taken <= 8


def test_a_plain_task_between_invitations_is_taken_by_itself_and_runs(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path, max_batch_size=8) as service:
        jobs: dict[str, str] = {}
        for i in range(4):
            jobs[service.submit(f"number {i}", max_tokens=6)] = f"number {i}"
            native = service.celery.send_task(
                keys.TASK_NAME, kwargs={"prompt": f"plain {i}", "seed": 7, "max_tokens": 6}
            )
            jobs[str(native.id)] = f"plain {i}"
        service.worker()

        for job, prompt in jobs.items():
            eventually("it is a job", partial(service.client.exists, keys.record(job)))
            assert service.wait_for_end(job)["text"] == simulated_text(prompt, 7, 6)


def _calls(service: Service, command: str) -> int:
    """How often the server has run a command."""
    stats: Any = service.client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


def test_what_rides_is_unacknowledged_and_nothing_else(service: Service) -> None:
    service.worker(max_batch_size=3)
    jobs = [service.submit(f"number {i}", max_tokens=5000) for i in range(2)]
    for job in jobs:
        service.wait_for_token(job, 1)
    eventually("both messages are recorded", lambda: service.client.hlen(keys.UNACKED) == 2)
    assert service.client.zcard(keys.UNACKED_INDEX) == 2
    # rides so short that their end comes beside the record of their message
    for number in range(40):
        assert service.wait_for_end(service.submit(f"short {number}", max_tokens=1))["status"] == "succeeded"
    eventually("theirs are gone", lambda: service.client.hlen(keys.UNACKED) == 2)
    for job in jobs:
        service.cancel(job)
        service.wait_for_end(job)
    eventually("no message is left", lambda: not service.client.hlen(keys.UNACKED))
    assert service.client.zcard(keys.UNACKED_INDEX) == 0
