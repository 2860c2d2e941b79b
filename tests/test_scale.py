"""More workers and fewer of them, while jobs wait and ride: real workers, real model processes, a real Redis."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import keys
from tests.service import Service, eventually, simulated_text

#: From a worker's heartbeat that says ready to its first claim.
TAKES_LOAD_S = 1.0


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """Steps of 20 ms, so that jobs ride for as long as a test looks at them; all else as it comes."""
    with Service(redis_url, tmp_path, simulated_step_ms=20) as running:
        yield running


def now_ms(service: Service) -> float:
    """The ledger's clock, which claims are timed by."""
    seconds, microseconds = service.client.time()
    return 1000 * int(seconds) + int(microseconds) / 1000


def riders_of(service: Service, worker: str, jobs: list[str]) -> list[str]:
    records = {job: service.client.hmget(keys.record(job), ["status", "worker"]) for job in jobs}
    return [job for job, record in records.items() if record == ["running", worker]]


def start_and_time(service: Service, name: str) -> float:
    """Start a worker; returns the last time at which its heartbeat did not yet say ready, in ms."""
    worker = service.worker(name, ready=False)
    last = now_ms(service)

    def is_ready() -> bool:
        nonlocal last
        looked_at = now_ms(service)
        if any(info.pid == worker.pid and info.state == "ready" for info in service.list_workers()):
            return True
        assert not worker.has_ended, worker.log.read_text()
        last = looked_at
        return False

    eventually(f"{name} is ready", is_ready)
    return last


def test_the_first_worker_takes_the_jobs_that_wait_within_a_second_of_being_ready(service: Service) -> None:
    jobs = [service.submit(f"number {i}", max_tokens=30) for i in range(6)]
    not_ready_ms = start_and_time(service, "worker-1")
    for job in jobs[:4]:
        service.wait_for_token(job, 1)
        assert 1000 * service.view(job)["started_at"] - not_ready_ms < 1000 * TAKES_LOAD_S
    for i, job in enumerate(jobs):
        assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 30)


def test_a_new_worker_beside_a_full_one_takes_load_within_a_second_of_being_ready(service: Service) -> None:
    service.worker("worker-1")
    riding = [service.submit(f"rides {i}", max_tokens=5000) for i in range(4)]
    for job in riding:
        service.wait_for_token(job, 1)
    waiting = [service.submit(f"waits {i}", max_tokens=30) for i in range(4)]
    assert {service.view(job)["status"] for job in waiting} == {"queued"}
    not_ready_ms = start_and_time(service, "worker-2")
    for i, job in enumerate(waiting):
        view = service.wait_for_end(job)
        assert 1000 * view["started_at"] - not_ready_ms < 1000 * TAKES_LOAD_S
        assert view["text"] == simulated_text(f"waits {i}", 7, 30)
    for job in riding:
        assert service.view(job)["status"] == "running"
        service.cancel(job)


def test_a_drained_worker_s_riders_go_on_in_the_other_one_at_their_position(service: Service) -> None:
    drained = service.worker("worker-1", drain_s=0.2)
    service.worker("worker-2")
    jobs = [service.submit(f"number {i}", max_tokens=300) for i in range(6)]
    for job in jobs:
        service.wait_for_token(job, 2)
    moved = riders_of(service, "worker-1", jobs)
    assert len(moved) >= 2, "two workers of four slots carry six jobs"
    drained.signal(signal.SIGTERM)
    eventually("it drains", lambda: any(info.state == "draining" for info in service.list_workers()))
    late = service.submit("late", max_tokens=20)
    assert drained.wait() == 0
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert (view["status"], view["text"]) == ("succeeded", simulated_text(f"number {i}", 7, 300))
        assert view["attempts"] == (2 if job in moved else 1)
        service.assert_whole(job)
    assert service.wait_for_end(late)["text"] == simulated_text("late", 7, 20)
    assert service.client.hget(keys.record(late), "worker") == "worker-2"
