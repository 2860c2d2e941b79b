"""The whole path: HTTP, ledger, broker, a real worker with its model process (simulated engine), and back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.api_server import ApiServer, events_of, running_api, tokens_of
from tests.mixed_jobs import draw_plans, run_all
from tests.service import Service, eventually, simulated_text


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=5, sse_heartbeat_s=1) as service:
        service.worker()
        yield service


@pytest.fixture
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def test_the_text_is_what_the_engine_says(client: httpx2.Client) -> None:
    body = {"prompt": "Hello, I am", "seed": 5}
    assert client.post("/basic_generate", json=body).json()["generated_text"] == "Hello, I am" + simulated_text(
        "Hello, I am", 5, 50
    )
    with client.stream("POST", "/generate_stream", json=body) as response:
        events = tokens_of(response)
    assert "".join(event.data["token"] for event in events if event.data) == simulated_text("Hello, I am", 5, 20)
    assert [event.id for event in events] == [*map(str, range(1, 21)), "20.end"]


def test_a_failure_of_the_engine_is_the_answer(client: httpx2.Client) -> None:
    response = client.post("/basic_generate", json={"prompt": "[[raise]]@3"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    assert client.get(response.headers["location"]).json()["status"] == "failed"
    with client.stream("POST", "/generate_stream", json={"prompt": "[[raise]]@1"}) as stream:
        (event,) = tokens_of(stream)
    assert event.data is not None
    assert event.data["error"]["code"] == "engine_error"


def test_a_prompt_that_the_worker_finds_too_long_is_400_with_the_numbers(client: httpx2.Client) -> None:
    response = client.post("/basic_generate", json={"prompt": "word " * 9000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in response.json()["error"]["message"]


def test_a_stream_goes_on_when_the_model_process_is_killed(service: Service, client: httpx2.Client) -> None:
    body = {"prompt": "Hello", "seed": 3, "max_tokens": 200}
    with client.stream("POST", "/generate_stream", json=body) as response:
        events = []
        for event in events_of(response):
            if event.data is not None:
                events.append(event)
                if len(events) == 20:
                    service.workers[0].children()[0].kill()
    assert [event.id for event in events] == [*map(str, range(1, 201)), "200.end"]
    assert "".join(event.data["token"] for event in events if event.data) == simulated_text("Hello", 3, 200)


def test_a_stream_whose_client_goes_away_frees_its_slot(service: Service, client: httpx2.Client) -> None:
    body = {"prompt": "x", "max_tokens": 4000}
    with client.stream("POST", "/generate_stream", json=body) as response:
        next(events_of(response))
        eventually("it rides", lambda: service.riding() == 1)
    _assert_cancelled_in_the_middle(service, client)


def test_a_synchronous_request_whose_client_goes_away_frees_its_slot(service: Service, client: httpx2.Client) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        client.post("/basic_generate", json={"prompt": "x", "max_tokens": 4000}, timeout=1)
    _assert_cancelled_in_the_middle(service, client)


def _assert_cancelled_in_the_middle(service: Service, client: httpx2.Client) -> None:
    eventually("the slot is free", lambda: service.riding() == 0)
    (job,) = client.get("/jobs").json()["data"]
    assert job["status"] == "cancelled"
    assert 0 < job["usage"]["completion_tokens"] < 4000


def test_forty_mixed_jobs_with_cancels_and_reconnects_each_get_their_own_tokens(
    api: ApiServer, service: Service
) -> None:
    plans = draw_plans(40, 11, 60, lambda number, _: {"prompt": f"prompt {number}", "seed": number})
    run_all(api, plans, lambda plan: simulated_text(plan.body["prompt"], plan.body["seed"], plan.body["max_tokens"]))
    eventually("no slot is taken", lambda: service.riding() == 0)


def test_requests_that_are_cut_in_the_middle_never_get_anothers_answer(api: ApiServer, service: Service) -> None:
    with api.client() as client:
        ids = [client.post("/jobs", json={"prompt": "x", "max_tokens": 1}).json()["id"] for _ in range(8)]
    stop = threading.Event()

    def slow_down() -> None:
        while not stop.wait(0.03):
            service.client.client_pause(20)

    def cut(seed: int) -> None:
        draw = random.Random(seed)
        with api.client() as client:
            for _ in range(30):
                try:
                    client.get(f"/jobs/{draw.choice(ids)}/stream", timeout=draw.uniform(0.001, 0.05))
                except httpx2.TransportError:
                    continue

    def ask(id: str) -> None:
        with api.client() as client:
            for _ in range(40):
                assert client.get(f"/jobs/{id}").json()["id"] == id

    slower = threading.Thread(target=slow_down)
    slower.start()
    with ThreadPoolExecutor(16) as threads:
        work = [threads.submit(ask, id) for id in ids] + [threads.submit(cut, seed) for seed in range(8)]
        for one in work:
            one.result(60)
    stop.set()
    slower.join()


def test_at_the_end_no_key_is_without_a_time_to_live(api: ApiServer, service: Service, client: httpx2.Client) -> None:
    client.post("/generate", json={"prompts": ["a", "b"]}, headers={"Idempotency-Key": "k"})
    with client.stream("POST", "/generate_stream", json={"prompt": "x"}) as response:
        tokens_of(response)
    client.get("/health/accepting")
    kept = {"{carpool}:models", "{carpool}:schema"}
    for key in service.client.scan_iter("*carpool}*"):
        assert service.client.pttl(key) != -1 or key in kept or "unacked" in key, key
