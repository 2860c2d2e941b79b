"""The page while what is behind it is killed: the answer goes on, whole, and the page says what is wrong meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tasks import keys
from tests.api_process import ApiProcess
from tests.api_server import running_api
from tests.browser import visiting
from tests.playground import AWAY, Playground, chat_answer
from tests.redis_server import RedisServer
from tests.service import Service

TOKENS = 200


@pytest.fixture
def service(own_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("faults")
    with Service(
        own_redis.url, folder, simulated_step_ms=30, heartbeat_s=1, lease_s=6, renew_s=1, sse_heartbeat_s=1
    ) as service:
        yield service


def test_after_a_worker_is_killed_in_mid_stream_the_same_answer_goes_on(chromium: Browser, service: Service) -> None:
    worker = service.worker()
    with running_api(service.settings) as api, visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=TOKENS, seed=21)
        page.send("Kill the driver")
        page.wait_for_tokens(10)
        for child in worker.children():
            child.send_signal(signal.SIGKILL)
        worker.end()
        expect(page.fact("note")).to_have_text("worker lost, waiting for its recovery")
        expect(page.page.get_by_role("status")).to_contain_text("The worker is lost")
        expect(page.batch.locator("[data-state=silent], .person.lost").first).to_be_visible()
        page.page.reload()
        expect(page.fact("note")).to_have_text("worker lost, waiting for its recovery")
        service.worker("worker-2", ready=False)
        page.wait_for_status("succeeded", 60)
        expect(page.words).to_have_text(chat_answer("Kill the driver", 21, TOKENS))
        expect(page.fact("attempts")).to_have_text("2 workers in turn")
        service.assert_whole(page.job())


def test_after_the_model_process_is_killed_the_same_answer_goes_on(chromium: Browser, service: Service) -> None:
    worker = service.worker()
    with running_api(service.settings) as api, visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=TOKENS, seed=22)
        page.send("Kill the engine")
        page.wait_for_tokens(10)
        for child in worker.children():
            child.send_signal(signal.SIGKILL)
        page.wait_for_status("succeeded", 60)
        expect(page.words).to_have_text(chat_answer("Kill the engine", 22, TOKENS))
        service.assert_whole(page.job())


def test_after_the_api_is_killed_the_stream_is_taken_up_where_it_was(chromium: Browser, service: Service) -> None:
    service.worker()
    with (
        ApiProcess(service.settings, service.folder) as first,
        visiting(chromium, first.url, expected=[AWAY, "ERR_INCOMPLETE_CHUNKED"]) as visitor,
    ):
        page = Playground.of(visitor)
        page.set(max_tokens=TOKENS, seed=23)
        page.send("Kill the road")
        shown = page.wait_for_tokens(10)
        first.kill()
        expect(page.fact("note")).to_have_text("the server does not answer, trying again")
        expect(page.page.locator("#pulse")).to_contain_text("no news from the server")
        with (
            page.page.expect_request(
                lambda request: request.url.endswith("/stream") and "last-event-id" in request.headers
            ) as taken_up,
            ApiProcess(service.settings, service.folder, urlsplit(first.url).port),
        ):
            page.wait_for_status("succeeded", 60)
            assert int(taken_up.value.headers["last-event-id"]) >= shown
            expect(page.words).to_have_text(chat_answer("Kill the road", 23, TOKENS))
            expect(page.page.locator("#pulse")).to_contain_text("of 4 seats taken")
            # a message that is sent while nobody answers is sent when somebody does
            visitor.context.set_offline(True)
            page.send("Through a tunnel")
            expect(page.fact("note")).to_have_text("the server does not answer, trying again")
            visitor.context.set_offline(False)
            page.wait_for_status("succeeded")
        assert service.client.zcard(keys.jobs(keys.NO_KEY)) == 2


def test_while_no_worker_is_up_the_page_says_what_is_waited_for(chromium: Browser, service: Service) -> None:
    with running_api(service.settings) as api, visiting(chromium, api.url) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=5, seed=24)
        page.send("Anybody?")
        expect(page.fact("note")).to_have_text("no worker is up, the job waits for one")
        expect(page.page.locator("#pulse")).to_contain_text("no worker is ready")
        service.worker(ready=False)
        page.wait_for_status("succeeded", 60)
        expect(page.words).to_have_text(chat_answer("Anybody?", 24, 5))


def test_while_redis_is_away_nothing_is_lost(chromium: Browser, service: Service, own_redis: RedisServer) -> None:
    service.worker()
    with running_api(service.settings) as api, visiting(chromium, api.url, expected=[AWAY]) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=TOKENS, seed=25)
        page.send("Kill the map")
        page.wait_for_tokens(10)
        own_redis.kill()
        expect(page.page.locator("#pulse")).to_contain_text("no news from the server")
        own_redis.start()
        page.wait_for_status("succeeded", 60)
        expect(page.words).to_have_text(chat_answer("Kill the map", 25, TOKENS))
