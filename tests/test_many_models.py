"""Two models on one Redis, each with a real worker of its own; and workers of one pool whose models differ."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tasks import keys
from tests.api_server import ApiServer, running_api, tokens_of
from tests.instance import carpool
from tests.openai_clients import openai_client
from tests.scripted_owner import ScriptedOwner
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(180)

TOKENS = 100
SHORT = {"lease_s": 1.5, "renew_s": 0.4, "grace_s": 0.5, "reaper_tick_s": 0.3, "heartbeat_s": 0.3}


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=20, **SHORT) as running:
        yield running


@pytest.fixture
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


@pytest.fixture
def client(api: ApiServer) -> Iterator[httpx2.Client]:
    with api.client(timeout=60) as client:
        yield client


def submit(client: httpx2.Client, model: str, prompt: str, **fields: Any) -> str:
    body = {"model": model, "prompt": prompt, "seed": 7, "max_tokens": TOKENS, **fields}
    return str(client.post("/jobs", json=body).raise_for_status().json()["id"])


def owners(service: Service, job: str) -> list[str]:
    """Who took the job up, in order."""
    log: Any = service.client.xrange(keys.log(job))
    entries = [json.loads(fields["d"]) for _, fields in log]
    return [entry["worker"] for entry in entries if entry["t"] == "marker"]


def free_slots(service: Service) -> dict[str, int]:
    return {worker.pool: worker.free for worker in service.list_workers()}


def test_jobs_and_streams_of_two_models_ride_at_once_each_with_its_own_worker(
    service: Service, client: httpx2.Client, api: ApiServer
) -> None:
    service.worker("worker-a", served_model_name="alpha")
    service.worker("worker-b", served_model_name="beta")
    with openai_client(api) as openai:
        assert {model.id for model in openai.models.list()} == {"alpha", "beta"}
    jobs = {model: [submit(client, model, f"{model} {i}") for i in range(4)] for model in ("alpha", "beta")}
    eventually("both are full", lambda: free_slots(service) == {"alpha": 0, "beta": 0})

    def follow(job: str) -> str:
        with client.stream("GET", f"/jobs/{job}/stream") as response:
            events = tokens_of(response)
        assert [event.id for event in events] == [*map(str, range(1, TOKENS + 1)), f"{TOKENS}.end"]
        return "".join(event.data["token"] for event in events if event.data)

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(follow, [*jobs["alpha"], *jobs["beta"]]))
    prompts = [f"{model} {i}" for model in ("alpha", "beta") for i in range(4)]
    assert texts == [simulated_text(prompt, 7, TOKENS) for prompt in prompts]
    for model, name in (("alpha", "worker-a"), ("beta", "worker-b")):
        for job in jobs[model]:
            service.assert_whole(job)
            assert owners(service, job) == [name]
            assert service.view(job)["model"] == model


def test_a_model_whose_slots_are_taken_leaves_those_of_the_other_alone(service: Service, client: httpx2.Client) -> None:
    service.worker("worker-a", served_model_name="alpha", max_batch_size=1)
    service.worker("worker-b", served_model_name="beta")
    riding = submit(client, "alpha", "long", max_tokens=8000)
    waiting = submit(client, "alpha", "waits")
    service.wait_for_token(riding, 1)
    assert client.post("/v1/completions", json={"model": "beta", "prompt": "x", "seed": 7}).status_code == 200
    assert service.view(waiting)["status"] == "queued"
    assert client.post(f"/jobs/{waiting}/cancel", json={}).json()["status"] == "cancelled"
    client.post(f"/jobs/{riding}/cancel", json={})
    assert service.wait_for_end(riding)["status"] == "cancelled"
    eventually("its slot is free", lambda: free_slots(service) == {"alpha": 1, "beta": 4})


def test_one_model_going_away_does_not_disturb_the_other_and_its_jobs_wait_for_it(
    service: Service, client: httpx2.Client
) -> None:
    dying = service.worker("worker-a", served_model_name="alpha")
    service.worker("worker-b", served_model_name="beta")
    ours, theirs = submit(client, "alpha", "ours", max_tokens=400), submit(client, "beta", "theirs", max_tokens=400)
    for job in (ours, theirs):
        service.wait_for_token(job, 5)
    dying.signal(signal.SIGKILL)
    dying.wait()

    def models() -> Any:
        return {model["model"]: model["state"] for model in client.get("/health/ready").json()["models"]}

    eventually("it is gone", lambda: models() == {"beta": "ready"})
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["beta"]
    late = submit(client, "alpha", "late", max_tokens=5)
    eventually("its queue is shown", lambda: models() == {"alpha": "no worker", "beta": "ready"})
    assert service.wait_for_end(theirs)["text"] == simulated_text("theirs", 7, 400)
    assert owners(service, theirs) == ["worker-b"]
    assert service.view(ours)["status"] == "running"
    assert service.view(late)["status"] == "queued"
    service.worker("worker-a again", served_model_name="alpha", simulated_step_ms=0)
    assert service.wait_for_end(ours)["text"] == simulated_text("ours", 7, 400)
    assert service.wait_for_end(late)["text"] == simulated_text("late", 7, 5)
    assert owners(service, ours) == ["worker-a", "worker-a again"]
    service.assert_whole(ours)


def test_a_plain_celery_task_goes_to_the_model_that_it_names_whoever_takes_its_message(service: Service) -> None:
    service.worker("worker-a", served_model_name="alpha")
    service.worker("worker-b", served_model_name="beta")
    tasks = []
    for i in range(6):
        kwargs = {"prompt": f"number {i}", "model": ("alpha", "beta")[i % 2], "max_tokens": 3, "seed": 7}
        tasks.append(service.celery.send_task(keys.TASK_NAME, kwargs=kwargs))
    for i, task in enumerate(tasks):
        view = task.get(timeout=60)
        assert (view["text"], view["model"]) == (simulated_text(f"number {i}", 7, 3), ("alpha", "beta")[i % 2])
        assert owners(service, task.id) == [("worker-a", "worker-b")[i % 2]]


def test_status_shows_what_each_worker_serves_and_how_busy_it_is(
    service: Service, client: httpx2.Client, redis_url: str, tmp_path: Path
) -> None:
    service.worker("worker-a", served_model_name="alpha")
    service.worker("worker-b", served_model_name="beta", max_batch_size=2)
    riding = submit(client, "alpha", "long", max_tokens=8000)
    service.wait_for_token(riding, 60)
    eventually("the heartbeats say so", lambda: free_slots(service) == {"alpha": 3, "beta": 2})
    command = ("status", "--redis-url", redis_url, "--data-dir", str(tmp_path / "none"))
    found = json.loads(carpool(*command, "--json").stdout)
    workers = {process["pool"]: process for process in found if process["role"] == "worker"}
    alpha = workers["alpha"]
    assert (alpha["name"], alpha["state"], alpha["engine"], alpha["device"]) == (
        "worker-a",
        "ready",
        "simulated",
        "cpu",
    )
    assert (alpha["slots"], alpha["free"], alpha["context_length"], alpha["model"]) == (4, 3, 8192, "simulated")
    assert alpha["version"]
    assert 1 < alpha["tokens_per_s"] < 60
    assert (workers["beta"]["slots"], workers["beta"]["tokens_per_s"]) == (2, 0)
    text = carpool(*command).stdout
    assert "alpha (simulated) on simulated, cpu: 1 of 4 slots ride" in text
    assert "beta (simulated) on simulated, cpu: 0 of 2 slots ride\n" in text


# --- one pool, two models ---------------------------------------------------------------------------------------------


def test_a_job_half_done_waits_for_a_worker_of_its_own_model_and_new_ones_go_to_whoever_is_there(
    service: Service,
) -> None:
    """`docs/protocol.md`: a worker with another fingerprint does not go on with a job that has tokens."""
    with ScriptedOwner(service.settings, name="older", fingerprint="older") as older:
        older.heartbeat()
        half_done, untouched = service.submit("half done", max_tokens=6), service.submit("untouched", max_tokens=6)
        ride = older.claim(half_done)
        older.write(ride, " a", " b")
        service.worker("worker-1")
        assert service.wait_for_end(untouched)["text"] == simulated_text("untouched", 7, 6)
        assert owners(service, untouched) == ["worker-1"]
        # its lease runs out, and the real worker is the only other one
        service.wait_for_end(service.submit("another", max_tokens=100))
        eventually("its lease has run out", lambda: _lease_is_over(service, half_done))
        service.wait_for_end(service.submit("one more", max_tokens=100))
        assert service.view(half_done)["status"] == "running"
        assert owners(service, half_done) == ["older"]
        again = older.claim(half_done)
        assert again.k == 2
        older.write(again, " c")
        older.finish(again)
        assert service.view(half_done)["text"] == " a b c"
        service.assert_whole(half_done)


@pytest.mark.slow  # a minute: for so long its model may come back
def test_a_job_that_no_worker_of_the_pool_can_go_on_with_ends_with_its_text(service: Service) -> None:
    with ScriptedOwner(service.settings, name="older", fingerprint="older") as older:
        half_done = service.submit("half done", max_tokens=6)
        older.write(older.claim(half_done), " a", " b")
    service.worker("worker-1")
    view = service.wait_for_end(half_done, bound_s=100)
    assert (view["status"], view["error"]["code"], view["text"]) == ("failed", "model_changed", " a b")


def _lease_is_over(service: Service, job: str) -> bool:
    seconds, micros = service.client.time()
    return int(str(service.client.hget(keys.record(job), "lease"))) < seconds * 1000 + micros // 1000
