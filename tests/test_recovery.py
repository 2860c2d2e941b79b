"""How soon a job rides again, with the settings that the product has by default."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.api_server import running_api
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(180)

TOKENS = 600


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """Everything but the engine's pace is as it comes."""
    with Service(redis_url, tmp_path, simulated_step_ms=30) as service:
        yield service


def reached(service: Service, job: str) -> int:
    return int(service.view(job)["usage"]["completion_tokens"])


def test_jobs_of_a_killed_worker_ride_again_within_15_s_where_another_is_up(service: Service) -> None:
    killed = service.worker("worker-1")
    jobs = [service.submit(f"number {i}", max_tokens=TOKENS) for i in range(4)]
    for job in jobs:
        service.wait_for_token(job, 5)
    service.worker("worker-2", simulated_step_ms=0)
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed_at = time.monotonic()
    have = {job: reached(service, job) for job in jobs}
    for job in jobs:
        service.wait_for_token(job, have[job] + 1)
        assert time.monotonic() - killed_at < 15
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert (view["text"], view["attempts"]) == (simulated_text(f"number {i}", 7, TOKENS), 2)
        service.assert_whole(job)


def test_riders_of_a_killed_model_process_go_on_as_soon_as_its_successor_has_loaded(service: Service) -> None:
    worker = service.worker()
    jobs = [service.submit(f"number {i}", max_tokens=TOKENS) for i in range(3)]
    for job in jobs:
        service.wait_for_token(job, 5)
    (info,) = service.list_workers()
    assert info.child_pid is not None
    with running_api(service.settings) as api, api.client() as client:
        psutil.Process(info.child_pid).kill()
        eventually("it is missed", lambda: service.list_workers()[0].state == "restarting")
        have = {job: reached(service, job) for job in jobs}
        accepted = client.post("/jobs", json={"prompt": "meanwhile", "seed": 7, "max_tokens": 5})
        assert service.list_workers()[0].state == "restarting", "it was accepted while nothing was loaded"
        assert accepted.status_code == 202
        eventually("another one has loaded", lambda: worker.log.read_text().count('"model_ready"') == 2)
        loaded_at = time.monotonic()
        for job in jobs:
            service.wait_for_token(job, have[job] + 1)
        assert time.monotonic() - loaded_at < 2
        assert service.wait_for_end(accepted.json()["id"])["text"] == simulated_text("meanwhile", 7, 5)
    for job in jobs:
        assert service.view(job)["attempts"] == 1, "the ledger need not hear of it"
        assert service.view(job)["status"] == "running"
