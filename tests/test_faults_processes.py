"""Each process is killed, or paused for longer than its lease: every job ends once, with the tokens it is due."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api_server import events_of
from tests.instance import Instance, until
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(240)

SHORT = {
    "LEASE_S": "3",
    "RENEW_S": "0.8",
    "GRACE_S": "1",
    "REAPER_TICK_S": "0.3",
    "HEARTBEAT_S": "0.3",
    "SSE_HEARTBEAT_S": "1",
    "DRAIN_S": "3",
    "APPENDFSYNC": "always",
    "SIMULATED_STEP_MS": "20",
}
TOKENS = 300


# --- a whole instance ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    settings = {f"CARPOOL_{name}": value for name, value in SHORT.items()}
    with Instance(tmp_path_factory.mktemp("instance"), "--workers", "2", settings=settings) as instance:
        yield instance.ready()


class Riders:
    """Jobs that ride, each with a client that follows it through whatever happens."""

    def __init__(self, instance: Instance, number: int, prompt: str) -> None:
        self.url = instance.api_url()
        self.client = httpx2.Client(base_url=self.url, timeout=10, trust_env=False)
        self.prompts = [f"{prompt} {i}" for i in range(number)]
        self.jobs = [self._submit(prompt) for prompt in self.prompts]
        self.num_cut = 0
        self._threads = ThreadPoolExecutor(number)
        self._have = dict.fromkeys(self.jobs, 0)
        self._texts = [self._threads.submit(self._follow, job) for job in self.jobs]

    def _submit(self, prompt: str) -> str:
        body = {"prompt": prompt, "seed": 7, "max_tokens": TOKENS}
        return str(self.client.post("/jobs", json=body, headers={"Idempotency-Key": prompt}).json()["id"])

    def _follow(self, job: str) -> str:
        """Assemble the text, with a check that no token comes twice or is missing."""
        text, cursor, until_ = "", "", time.monotonic() + 90
        with httpx2.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            while not cursor.endswith(".end"):
                assert time.monotonic() < until_, f"the stream of {job} stands still behind {cursor}"
                try:
                    with client.stream("GET", f"/jobs/{job}/stream", headers={"Last-Event-ID": cursor}) as response:
                        if response.status_code != 200:
                            time.sleep(0.1)
                            continue
                        for event in events_of(response):
                            if event.data is not None:
                                ends = event.id.endswith(".end")
                                assert event.data["n"] == self._have[job] + (0 if ends else 1)
                                self._have[job], cursor = event.data["n"], event.id
                                text += event.data["token"]
                except httpx2.TransportError:
                    self.num_cut += 1
                    time.sleep(0.05)
        return text

    def wait_for_token(self, n: int) -> None:
        until(lambda: all(have >= n for have in self._have.values()), f"each has token {n}", 60)

    def assert_whole(self) -> None:
        """Every client has the right text, and the record says the same."""
        for prompt, job, text in zip(self.prompts, self.jobs, self._texts, strict=True):
            wanted = simulated_text(prompt, 7, TOKENS)
            assert text.result(120) == wanted
            view = self.client.get(f"/jobs/{job}").json()
            assert (view["status"], view["text"]) == ("succeeded", wanted)
        self._threads.shutdown()
        self.client.close()


def _ready_again(instance: Instance) -> None:
    def all_run() -> bool:
        found = instance.status()
        return len(found) == 7 and all(process["state"] in ("running", "ready") for process in found)

    until(all_run, "every process is back", 60)


@pytest.mark.parametrize("role", ["worker", "model-worker", "api", "redis"])
def test_killing_any_one_process_loses_doubles_and_gaps_nothing(instance: Instance, role: str) -> None:
    _ready_again(instance)
    riders = Riders(instance, 6, f"kill {role}")
    riders.wait_for_token(5)
    os.kill(instance.pid(role), signal.SIGKILL)
    riders.assert_whole()
    if role == "api":
        assert riders.num_cut >= 6
    _ready_again(instance)


def test_killing_all_processes_at_once_loses_doubles_and_gaps_nothing(instance: Instance) -> None:
    _ready_again(instance)
    riders = Riders(instance, 6, "kill all")
    riders.wait_for_token(5)
    pids = [process["pid"] for process in instance.status() if process["role"] != "supervisor"]
    assert len(pids) == 6
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    riders.assert_whole()
    _ready_again(instance)


def test_a_request_that_is_sent_again_after_the_api_died_makes_no_second_job(instance: Instance) -> None:
    _ready_again(instance)
    body = {"prompt": "sent again", "seed": 7, "max_tokens": TOKENS}
    headers = {"Idempotency-Key": "sent again"}
    answers: list[httpx2.Response] = []

    def post() -> None:
        while not answers:
            try:
                url = f"{instance.api_url()}/basic_generate"
                answers.append(httpx2.post(url, json=body, headers=headers, timeout=60, trust_env=False))
            except httpx2.TransportError:
                time.sleep(0.05)

    poster = threading.Thread(target=post)
    poster.start()
    with httpx2.Client(base_url=instance.api_url(), timeout=10, trust_env=False) as client:

        def newest() -> dict[str, Any]:
            (job,) = client.get("/jobs", params={"limit": 1}).json()["data"]
            return dict(job)

        until(lambda: newest()["usage"]["completion_tokens"] > 5 and newest()["status"] == "running", "it rides")
        job = newest()["id"]
        os.kill(instance.pid("api"), signal.SIGKILL)
        poster.join(90)
        assert answers[0].json()["generated_text"] == "sent again" + simulated_text("sent again", 7, TOKENS)
        assert answers[0].headers["x-carpool-job-id"] == job
        assert newest()["id"] == job


# --- workers alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    short = {"lease_s": 2, "renew_s": 0.5, "grace_s": 0.5, "reaper_tick_s": 0.3, "heartbeat_s": 0.3}
    with Service(redis_url, tmp_path, simulated_step_ms=20, **short) as service:
        yield service


def test_a_paused_worker_whose_jobs_went_to_another_writes_nothing_when_it_wakes_up(service: Service) -> None:
    paused = service.worker("worker-1")
    jobs = [service.submit(f"number {i}", max_tokens=150) for i in range(4)]
    for job in jobs:
        service.wait_for_token(job, 10)
    paused.signal(signal.SIGSTOP)
    service.worker("worker-2")
    for job in jobs:
        service.wait_for_entry(job, lambda entry: entry.kind == "marker" and entry.n > 0)
    paused.signal(signal.SIGCONT)
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert view["text"] == simulated_text(f"number {i}", 7, 150)
        assert view["attempts"] == 2
        service.assert_whole(job)
    eventually("it has noticed that it lost them", lambda: paused.log.read_text().count('"ride_lost"') == 4)
    eventually("its slots are free again", lambda: service.riding() == 0)
    more = [service.submit(f"more {i}", max_tokens=150) for i in range(8)]
    for job in more:
        service.wait_for_token(job, 1)
    assert all(service.view(job)["status"] == "running" for job in more), "both workers take jobs"


def test_a_paused_worker_that_wakes_up_in_time_goes_on_as_if_nothing_had_been(service: Service) -> None:
    paused = service.worker("worker-1")
    service.worker("worker-2", max_batch_size=1)
    jobs = [service.submit(f"number {i}", max_tokens=100) for i in range(5)]
    for job in jobs:
        service.wait_for_token(job, 5)
    paused.signal(signal.SIGSTOP)
    time.sleep(1)
    paused.signal(signal.SIGCONT)
    for i, job in enumerate(jobs):
        assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 100)
        assert service.view(job)["attempts"] == 1
        service.assert_whole(job)


def test_a_cancel_of_a_job_whose_owner_is_paused_ends_it_once_its_lease_is_out(service: Service) -> None:
    paused = service.worker("worker-1")
    job = service.submit("long", max_tokens=5000)
    service.wait_for_token(job, 5)
    paused.signal(signal.SIGSTOP)
    assert service.cancel(job) == "requested"
    view = service.wait_for_end(job)
    assert view["status"] == "cancelled"
    paused.signal(signal.SIGCONT)
    eventually("its slot is free", lambda: service.riding() == 0)
    assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"
    assert service.view(job) == view
    service.assert_whole(job)


def test_a_worker_that_is_cut_off_from_redis_loses_its_jobs_to_another_and_writes_nothing_later(
    redis_server: RedisServer, service: Service
) -> None:
    with RedisProxy(redis_server.port) as proxy:
        cut_off = service.worker("worker-1", redis_url=proxy.url)
        jobs = [service.submit(f"number {i}", max_tokens=150) for i in range(3)]
        unwanted = service.submit("unwanted", max_tokens=5000)
        for job in (*jobs, unwanted):
            service.wait_for_token(job, 10)
        proxy.cut()
        assert service.cancel(unwanted) == "requested"
        assert service.view(unwanted)["status"] == "running", "its owner may still compute it"
        service.worker("worker-2")
        cancelled = service.wait_for_end(unwanted)
        assert cancelled["status"] == "cancelled"
        for job in jobs:
            service.wait_for_entry(job, lambda entry: entry.kind == "marker" and entry.n > 0)
        proxy.mend()
        for i, job in enumerate(jobs):
            view = service.wait_for_end(job)
            assert view["text"] == simulated_text(f"number {i}", 7, 150)
            assert view["attempts"] == 2
            service.assert_whole(job)
        service.assert_whole(unwanted)
        assert service.view(unwanted) == cancelled
        eventually("it has noticed what it lost", lambda: cut_off.log.read_text().count('"ride_lost"') == 3)
        eventually("its slots are free again", lambda: len(service.list_workers()) == 2 and service.riding() == 0)
        more = [service.submit(f"more {i}", max_tokens=100) for i in range(8)]
        for job in more:
            service.wait_for_token(job, 1)
        assert all(service.view(job)["status"] == "running" for job in more), "both workers take jobs"
