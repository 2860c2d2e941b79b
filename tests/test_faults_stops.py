"""Deadlines without a worker, and cancels before the first token, as clients of the API and of Celery see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.api_server import running_api, tokens_of
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(120)

#: Far longer than a test: who waits for its end has not cancelled it.
PREFILL_MS = 60_000


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=20) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[httpx2.Client]:
    with running_api(service.settings) as api, api.client() as client:
        yield client


def test_with_no_worker_alive_a_deadline_ends_stream_poll_and_wait(client: httpx2.Client) -> None:
    job = client.post("/jobs", json={"prompt": "Hello", "deadline_s": 0.3}).json()["id"]
    with client.stream("GET", f"/jobs/{job}/stream") as response:
        (end,) = tokens_of(response)
    assert end.id == "0.end"
    assert end.data is not None
    assert (end.data["status"], end.data["error"]["code"]) == ("expired", "deadline_exceeded")
    view = client.get(f"/jobs/{job}").json()
    assert (view["status"], view["finish_reason"]) == ("expired", "expired")
    for path, body in (("/basic_generate", {"prompt": "a"}), ("/generate", {"prompts": ["a", "b"]})):
        waited = client.post(path, json={**body, "deadline_s": 0.3})
        assert (waited.status_code, waited.json()["error"]["code"]) == (504, "deadline_exceeded")
    with client.stream("POST", "/generate_stream", json={"prompt": "a", "deadline_s": 0.3}) as response:
        (end,) = tokens_of(response)
    assert end.data is not None
    assert end.data["status"] == "expired"


def _by_the_api(service: Service, client: httpx2.Client, job: str) -> None:
    assert client.post(f"/jobs/{job}/cancel").status_code in (200, 202)


def _by_terminate(service: Service, client: httpx2.Client, job: str) -> None:
    service.celery.control.revoke(job, terminate=True)


def _by_a_deadline(service: Service, client: httpx2.Client, job: str) -> None:
    """Nobody does anything."""


@pytest.mark.parametrize(
    ("stop", "status", "deadline_s"),
    [(_by_the_api, "cancelled", None), (_by_terminate, "cancelled", None), (_by_a_deadline, "expired", 2)],
    ids=["the API", "Flower's Terminate", "a deadline"],
)
def test_a_job_that_is_stopped_in_its_prefill_frees_the_slot_for_the_next(
    service: Service,
    client: httpx2.Client,
    stop: Callable[[Service, httpx2.Client, str], None],
    status: str,
    deadline_s: float | None,
) -> None:
    service.worker(max_batch_size=1, simulated_prefill_ms=PREFILL_MS)
    job = service.submit("in prefill", deadline_s=deadline_s)
    service.wait_for_entry(job, lambda entry: entry.kind == "marker")
    eventually("it has boarded", lambda: service.riding() == 1)
    waiting = service.submit("waiting", max_tokens=5)
    asked_at = time.monotonic()
    stop(service, client, job)
    view = service.wait_for_end(job)
    assert time.monotonic() - asked_at < 10
    assert (view["status"], view["text"]) == (status, "")
    service.wait_for_entry(waiting, lambda entry: entry.kind == "marker")
    assert service.cancel(waiting) == "requested"
    assert service.wait_for_end(waiting)["status"] == "cancelled"
    eventually("the slot is free", lambda: service.riding() == 0)
    service.assert_whole(job)


def test_a_stop_survives_the_worker_that_was_asked(service: Service, client: httpx2.Client) -> None:
    """Its owner is dead and nobody has noticed: the status waits until that is certain, and then says so."""
    worker = service.worker()
    job = service.submit("long", max_tokens=5000)
    service.wait_for_token(job, 5)
    worker.end()
    answer = client.post(f"/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["cancel_requested"], answer.json()["status"]) == (202, True, "running")
    asked_at = time.monotonic()
    service.worker("worker-2")
    with client.stream("GET", f"/jobs/{job}/stream", timeout=30) as response:
        events = tokens_of(response)
    assert time.monotonic() - asked_at < 15
    assert events[-1].data is not None
    assert events[-1].data["status"] == "cancelled"
    view = client.get(f"/jobs/{job}").json()
    assert view["text"] == simulated_text("long", 7, view["usage"]["completion_tokens"])
    assert view["attempts"] == 1, "nobody took it up only to stop it"
