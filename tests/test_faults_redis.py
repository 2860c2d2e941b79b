"""Redis is killed, stopped, cut off or full: workers stay alive, riders keep their place, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.errors import ExitCode
from tasks import keys
from tasks.codes import CarpoolError
from tasks.redis_clients import check_server, connect
from tasks.settings import Settings
from tests.api_server import running_api
from tests.instance import carpool
from tests.redis_server import RedisServer
from tests.service import Service, eventually, simulated_text

pytestmark = pytest.mark.timeout(180)

#: Longer than a lease.
OUTAGE_S = 5.0
SHORT = {"lease_s": 3, "renew_s": 0.8, "grace_s": 1, "reaper_tick_s": 0.3, "heartbeat_s": 0.3, "simulated_step_ms": 20}


@pytest.fixture
def always(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone that has everything on disk that it acknowledged."""
    with RedisServer(tmp_path / "always", appendfsync="always") as server:
        yield server


@pytest.fixture
def service(always: RedisServer, tmp_path: Path) -> Iterator[Service]:
    with Service(always.url, tmp_path, **SHORT) as service:
        yield service


def test_a_worker_survives_a_killed_redis_whatever_its_connections_were_doing(
    always: RedisServer, service: Service
) -> None:
    worker = service.worker()
    jobs = [service.submit(f"number {i}", max_tokens=700) for i in range(2)]
    for round_ in range(6):
        for job in jobs:
            service.wait_for_token(job, 1 + 40 * round_)
        always.kill()
        always.start()
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert view["text"] == simulated_text(f"number {i}", 7, 700)
        assert view["attempts"] == 1, worker.log.read_text()
        service.assert_whole(job)
    assert not worker.has_ended
    assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"
    eventually("no slot is taken", lambda: service.riding() == 0)


def _stopped(server: RedisServer) -> None:
    server.stop()
    time.sleep(OUTAGE_S)
    server.start()


def _killed(server: RedisServer) -> None:
    server.kill()
    time.sleep(OUTAGE_S)
    server.start()


def _frozen(server: RedisServer) -> None:
    server.pause()
    time.sleep(OUTAGE_S)
    server.resume()


@pytest.mark.parametrize("outage", [_stopped, _killed, _frozen])
def test_after_an_outage_longer_than_the_leases_riders_go_on_where_they_are(
    always: RedisServer, service: Service, outage: Callable[[RedisServer], None]
) -> None:
    service.worker("worker-1")
    service.worker("worker-2")
    jobs = [service.submit(f"number {i}", max_tokens=400) for i in range(6)]
    for job in jobs:
        service.wait_for_token(job, 10)
    outage(always)
    for i, job in enumerate(jobs):
        view = service.wait_for_end(job)
        assert view["text"] == simulated_text(f"number {i}", 7, 400)
        assert view["attempts"] == 1, "it was taken from a healthy worker"
        service.assert_whole(job)
    eventually("no slot is taken", lambda: service.riding() == 0)


def test_cancels_and_deadlines_survive_a_killed_redis(always: RedisServer, service: Service) -> None:
    service.worker(max_batch_size=2)
    cancelled = service.submit("cancelled", max_tokens=5000)
    expiring = service.submit("expiring", max_tokens=5000, deadline_s=4)
    queued = service.submit("queued", max_tokens=5000)
    for job in (cancelled, expiring):
        service.wait_for_token(job, 5)
    assert service.cancel(queued) == "cancelled"
    assert service.cancel(cancelled) == "requested"
    always.kill()
    always.start()
    assert service.wait_for_end(cancelled)["status"] == "cancelled"
    assert service.wait_for_end(expiring)["status"] == "expired"
    assert service.view(queued)["status"] == "cancelled"
    for job in (cancelled, expiring, queued):
        service.assert_whole(job)
    eventually("no slot is taken", lambda: service.riding() == 0)


def test_ten_cuts_of_all_connections_never_make_more_ride_than_there_are_slots(service: Service) -> None:
    service.worker(max_batch_size=3)
    jobs = [service.submit(f"number {i}", max_tokens=120) for i in range(12)]
    most = 0
    for round_ in range(10):
        service.client.client_kill_filter(_type="normal", skipme=True)
        service.client.client_kill_filter(_type="pubsub", skipme=True)
        for _ in range(10):
            most = max(most, sum(service.view(job)["status"] == "running" for job in jobs))
            most = max(most, service.riding())
        service.wait_for_token(jobs[0], 8 * round_ + 1)
    for i, job in enumerate(jobs):
        assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 120)
        assert service.view(job)["attempts"] == 1
        service.assert_whole(job)
    assert most == 3


def test_a_full_redis_refuses_new_jobs_and_lets_all_that_it_accepted_end(always: RedisServer, service: Service) -> None:
    worker = service.worker(max_batch_size=2)
    riding = [service.submit(f"riding {i}", max_tokens=150) for i in range(2)]
    for job in riding:
        service.wait_for_token(job, 1)
    waiting = [service.submit(f"waiting {i}", max_tokens=20) for i in range(4)]
    doomed = service.submit("doomed", max_tokens=20, deadline_s=1)
    native = service.celery.send_task("carpool.generate", ["native"], {"max_tokens": 4, "seed": 3})
    with always.client() as redis, running_api(service.settings) as api, api.client() as client:
        redis.config_set("maxmemory", "1")
        refused = client.post("/jobs", json={"prompt": "one more"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "redis_full"
        assert "maxmemory" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        for i, job in enumerate(riding):
            assert service.wait_for_end(job)["text"] == simulated_text(f"riding {i}", 7, 150)
        assert service.wait_for_end(doomed)["status"] == "expired", "nobody reaps while memory is full"
        for i, job in enumerate(waiting):
            assert service.wait_for_end(job)["text"] == simulated_text(f"waiting {i}", 7, 20)
        assert not worker.has_ended, worker.log.read_text()
        redis.config_set("maxmemory", "0")
        assert client.post("/jobs", json={"prompt": "one more"}).status_code == 202
        assert native.get(timeout=30)["text"] == simulated_text("native", 3, 4), "it waits for room, and hinders nobody"


def test_a_worker_outlasts_a_server_whose_disk_takes_no_more(always: RedisServer, service: Service) -> None:
    worker = service.worker()
    job = service.submit("riding", max_tokens=120)
    service.wait_for_token(job, 1)
    with always.client() as redis, running_api(service.settings) as api, api.client() as client:
        # where its snapshot should go stands a folder: the server answers as one whose disk is full
        in_the_way = always.folder / "dump.rdb"
        in_the_way.mkdir()
        redis.config_set("save", "3600 1")
        redis.bgsave()
        eventually("writes are refused", lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err")
        refused = client.post("/jobs", json={"prompt": "one more"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_unavailable")
        log = eventually(
            "the worker has found it out", lambda: "takes no writes" in (text := worker.log.read_text()) and text
        )
        assert not worker.has_ended, log
        in_the_way.rmdir()
        redis.config_set("save", "")
        assert service.wait_for_end(job)["text"] == simulated_text("riding", 7, 120)
        more = service.submit("one more", max_tokens=5)
        assert service.wait_for_end(more)["text"] == simulated_text("one more", 7, 5)
        assert not worker.has_ended, worker.log.read_text()


def test_a_worker_starts_on_a_full_redis_and_runs_what_waits(always: RedisServer, service: Service) -> None:
    job = service.submit("waiting", max_tokens=20)
    with always.client() as redis:
        redis.config_set("maxmemory", "1")
        service.worker()
        assert service.wait_for_end(job)["text"] == simulated_text("waiting", 7, 20)


def test_while_redis_reads_its_file_whoever_starts_says_that_it_does_not_answer(tmp_path: Path) -> None:
    slow = RedisServer(tmp_path / "slow", extra=("--key-load-delay", "10"))
    with slow, connect(Settings(redis_url=slow.url)) as client:
        pipeline = client.pipeline(transaction=False)
        for i in range(60_000):
            pipeline.set(f"key {i}", i)
        pipeline.execute()
        slow.kill()
        slow.start()
        with pytest.raises(CarpoolError, match="loading") as caught:
            check_server(client, slow.url)
        # what the supervisor never gives up
        assert caught.value.code.name == "redis_unavailable"


@pytest.mark.parametrize("command", ["api --port 0", "worker --engine simulated", "up --engine simulated --port 0"])
def test_whoever_starts_on_a_server_that_evicts_is_refused_with_the_command_that_mends_it(
    always: RedisServer, tmp_path: Path, command: str
) -> None:
    with always.client() as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
    settings = {"CARPOOL_REDIS_URL": always.url, "CARPOOL_DATA_DIR": str(tmp_path / "data")}
    done = carpool(*command.split(), settings=settings)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "maxmemory-policy allkeys-lru" in line
    assert "redis-cli CONFIG SET maxmemory-policy noeviction" in line
    assert done.returncode == ExitCode.PRECONDITION


@pytest.mark.parametrize("number", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_ten_seconds_after_the_last_job_nothing_is_left_of_any_of_them(
    redis_url: str, tmp_path: Path, number: int
) -> None:
    retention = {"retention_s": 5, "idempotency_s": 5, "deadline_s": 300}
    with Service(redis_url, tmp_path, **retention) as service:
        service.worker(max_batch_size=64)
        service.wait_for_end(service.submit("first"))
        # numbers of all jobs outlive each of them
        eventually("it is counted", lambda: service.client.exists(keys.counted(service.settings.pool)))
        with running_api(service.settings) as api, api.client() as client:
            before = {str(key) for key in service.client.keys("*")}
            for i in range(20):
                headers = {"Idempotency-Key": f"key {i}"}
                client.post("/generate", json={"prompts": ["a", "b"], "max_tokens": 2}, headers=headers)
                client.get(client.post("/jobs", json={"prompt": "x"}, headers=headers).headers["location"] + "?wait=1")
            service.celery.send_task("carpool.generate", ["native"], {"max_tokens": 2})
            service.cancel(service.submit("cancelled", max_tokens=8000))
            service.submit("expired", max_tokens=8000, deadline_s=0.2)
            service.submit("failed [[raise]]@2")
            for i in range(number):
                service.submit(f"number {i}", max_tokens=2)
            eventually("all have ended", lambda: service.client.zcard(keys.DUE) == 0, bound_s=300)

            def gone() -> bool:
                left = {str(key) for key in service.client.keys("*")} - before
                # what outlives its record: that a plain Celery task has been here, for a week
                return not {key for key in left if not key.startswith("{carpool}:tomb:")}

            eventually("nothing is left", gone, bound_s=10)
            assert service.keys_without_ttl() == set()
