"""ETAs and positions of real workers: how right they are, and that they are there right after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.service import Service, eventually

STEP_MS = 10


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=STEP_MS, max_batch_size=3) as service:
        yield service


def lengths(count: int, mean: int = 25) -> list[int]:
    """Tokens of jobs: most are short, and a few are long."""
    chance = random.Random(5)
    return [1 + min(8 * mean, int(chance.expovariate(1 / mean))) for _ in range(count)]


def test_the_median_eta_of_jobs_of_mixed_lengths_is_less_than_thirty_percent_off(service: Service) -> None:
    for number in range(2):
        service.worker(f"worker-{number}")
    warm = [service.submit(f"warm {i}", max_tokens=tokens) for i, tokens in enumerate(lengths(30))]
    for id in warm:
        service.wait_for_end(id)
    told: list[tuple[str, float]] = []
    for i, tokens in enumerate(lengths(150)):
        id = service.submit(f"number {i}", max_tokens=tokens)
        eta_s = service.view(id)["eta_s"]
        assert eta_s is not None
        told.append((id, eta_s))
    errors = []
    for id, eta_s in told:
        job = service.wait_for_end(id)
        took_s = job["finished_at"] - job["created_at"]
        errors.append(abs(eta_s - took_s) / took_s)
    assert median(errors) < 0.3, sorted(errors)[:: len(errors) // 10]


def test_an_eta_is_there_right_after_a_restart_and_shrinks_with_a_second_worker(service: Service) -> None:
    first = service.worker("first")
    for id in [service.submit(f"warm {i}", max_tokens=100) for i in range(6)]:
        service.wait_for_end(id)
    first.end()
    eventually("its heartbeat is over", lambda: not service.list_workers())
    ids = [service.submit(f"number {i}", max_tokens=400) for i in range(12)]
    assert service.view(ids[-1])["eta_s"] is None, "nobody is there to do it"
    service.worker("second")
    eventually("it rides", lambda: service.view(ids[0])["status"] == "running")
    alone = service.view(ids[-1])
    assert alone["eta_s"] == pytest.approx(4 * 400 * STEP_MS / 1000, rel=0.5)
    service.worker("third")
    eventually("both are full", lambda: service.riding() == 6)
    assert service.view(ids[-1])["eta_s"] < 0.75 * alone["eta_s"]
    running = service.view(ids[0])
    assert 0 < running["eta_s"] < 1.5 * 400 * STEP_MS / 1000
    assert running["queue_position"] is None


def test_jobs_start_in_the_order_of_their_positions(service: Service) -> None:
    ids = [service.submit(f"number {i}", max_tokens=5, priority=9 - i) for i in range(9)]
    told = {id: service.view(id)["queue_position"] for id in ids}
    assert sorted(told.values()) == list(range(1, 10))
    service.worker("only", max_batch_size=1)
    started = {id: service.wait_for_end(id)["started_at"] for id in ids}
    assert sorted(ids, key=lambda id: started[id]) == sorted(ids, key=lambda id: told[id])
