"""Two releases on one ledger, as in a rolling upgrade: real workers, model processes and APIs of both."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from ops.errors import ExitCode
from tasks import entries, keys
from tasks.acceptance import job_acceptance
from tasks.job_request import JobRequest
from tasks.ledger import script_text
from tests.api_server import running_api, tokens_of
from tests.instance import Instance, carpool
from tests.releases import NEXT, ApiProcess, copy_this_release, upgrade
from tests.service import Service, WorkerProcess, eventually, simulated_text

pytestmark = pytest.mark.timeout(180)

THIS = entries.VERSION
ADVICE = (
    f"the ledger in Redis is of a newer release (version {NEXT}, this one reads up to {THIS}). "
    "Upgrade: pip install --upgrade carpool"
)
TOKENS = 500
SHORT = {
    "lease_s": 2,
    "renew_s": 0.5,
    "grace_s": 0.5,
    "reaper_tick_s": 0.3,
    "heartbeat_s": 0.3,
    "simulated_step_ms": 20,
}


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a release that has other scripts, entries and messages than this one."""
    folder = copy_this_release(tmp_path_factory.mktemp("next-release"))
    upgrade(folder)
    return folder


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, **{**SHORT, "drain_s": 0.2}) as service:
        yield service


def raw_log(service: Service, job: str) -> list[dict[str, Any]]:
    log: Any = service.client.xrange(keys.log(job))
    return [json.loads(fields["d"]) for _, fields in log]


def _reached(service: Service, job: str) -> int:
    return int(str(service.client.hget(keys.record(job), "k") or 0))


def owners(service: Service, job: str) -> list[str]:
    """Who took the job up, in order."""
    return [entry["worker"] for entry in raw_log(service, job) if entry["t"] == "marker"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["handed back", "killed"])
def test_jobs_go_from_one_release_to_the_other_and_back_and_streams_of_both_are_whole(
    service: Service, next_release: Path, tmp_path: Path, how: signal.Signals
) -> None:
    def end(worker: WorkerProcess) -> None:
        worker.signal(how)
        worker.wait()

    with (
        running_api(service.settings) as this,
        this.client(timeout=60) as this_api,
        ApiProcess(next_release, tmp_path, service.settings) as following,
        following.client() as next_api,
        ThreadPoolExecutor(8) as threads,
    ):
        first = service.worker("this")
        jobs = []
        for i, client in enumerate((this_api, next_api, this_api, next_api)):
            body = {"prompt": f"number {i}", "seed": 7, "max_tokens": TOKENS}
            jobs.append(str(client.post("/jobs", json=body).raise_for_status().json()["id"]))

        def follow(job: str, client: Any) -> str:
            with client.stream("GET", f"/jobs/{job}/stream") as response:
                events = tokens_of(response)
            assert [event.id for event in events] == [*map(str, range(1, TOKENS + 1)), f"{TOKENS}.end"]
            return "".join(event.data["token"] for event in events if event.data)

        streams = [(job, threads.submit(follow, job, client)) for job in jobs for client in (this_api, next_api)]
        for job in jobs:
            service.wait_for_token(job, 20)
        second = service.worker("next", root=next_release)
        end(first)
        for job in jobs:
            eventually("the next release has it", lambda job=job: owners(service, job)[-1] == "next")  # type: ignore[misc]
        service.worker("this again", simulated_step_ms=0)
        end(second)
        for i, job in enumerate(jobs):
            assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, TOKENS)
            service.assert_whole(job)
            assert owners(service, job) == ["this", "next", "this again"]
            assert {entry["v"] for entry in raw_log(service, job)} == {THIS}
            assert not any("warmth" in entry for entry in raw_log(service, job))
        for job, text in streams:
            assert text.result(60) == service.view(job)["text"]


def test_once_the_older_release_is_gone_the_new_version_is_written_and_a_late_old_worker_leaves_it_alone(
    service: Service, next_release: Path, tmp_path: Path
) -> None:
    late = service.worker("late")
    following = service.worker("next", root=next_release)
    service.stop_keeping()
    late.signal(signal.SIGSTOP)
    assert service.client.get(keys.SCHEMA) == str(THIS)
    # as when it had been silent for a minute
    assert service.client.zrem(keys.VERSIONS, THIS) == 1
    eventually("nobody older lives", lambda: service.client.get(keys.SCHEMA) == str(NEXT))
    with ApiProcess(next_release, tmp_path, service.settings) as api, api.client() as client:
        new = client.post("/jobs", json={"prompt": "new", "max_tokens": TOKENS, "seed": 7}).json()["id"]
        eventually("it rides", lambda: _reached(service, new) >= 20)
    following.signal(signal.SIGKILL)
    following.wait()
    late.signal(signal.SIGCONT)
    assert late.wait() != 0
    assert ADVICE in late.log.read_text()
    service.worker("next again", root=next_release, simulated_step_ms=0)
    eventually("it ends", lambda: service.view(new)["status"] == "succeeded")
    assert service.view(new)["text"] == simulated_text("new", 7, TOKENS)
    log = raw_log(service, new)
    assert {entry["v"] for entry in log} == {NEXT}
    assert owners(service, new) == ["next", "next again"]
    assert all("warmth" in entry for entry in log if entry["t"] != "end")


def test_a_worker_leaves_a_record_of_a_newer_release_to_one_that_reads_it(service: Service, next_release: Path) -> None:
    worker = service.worker("this")
    job = "of-the-next-release"
    request = JobRequest(prompt="new", seed=7, max_tokens=TOKENS)
    accept = service.ledger.calls.accept(job_acceptance(job, service.settings.pool, request, service.settings))
    with service.client.pipeline(transaction=True) as pipeline:
        pipeline.eval(script_text(accept.script), len(accept.keys), *accept.keys, *accept.args)
        pipeline.hset(keys.record(job), "v", NEXT)
        pipeline.execute()
    eventually("it was asked", lambda: '"job_of_a_newer_release"' in worker.log.read_text())
    beside = service.submit("beside", max_tokens=5)
    assert service.wait_for_end(beside)["text"] == simulated_text("beside", 7, 5)
    assert (service.view(job)["status"], service.view(job)["attempts"]) == ("queued", 0)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    service.worker("next", root=next_release, simulated_step_ms=0)
    eventually("it ends", lambda: service.view(job)["status"] == "succeeded")
    assert service.view(job)["text"] == simulated_text("new", 7, TOKENS)
    assert owners(service, job) == ["next"]


def test_a_worker_whose_files_were_replaced_ends_before_it_misreads_its_child(service: Service, tmp_path: Path) -> None:
    folder = copy_this_release(tmp_path / "installed")
    worker = service.worker("replaced", root=folder)
    job = service.submit("long", max_tokens=TOKENS)
    service.wait_for_token(job, 10)
    upgrade(folder)
    (child,) = [process for process in worker.children() if "spawn_main" in " ".join(process.cmdline())]
    child.kill()
    assert worker.wait() != 0
    assert "Carpool was upgraded under it. Start the worker again" in worker.log.read_text()
    assert not psutil.pid_exists(child.pid)
    service.worker("started again", root=folder, simulated_step_ms=0)
    assert service.wait_for_end(job)["text"] == simulated_text("long", 7, TOKENS)
    assert owners(service, job)[-1] == "started again"
    service.assert_whole(job)


# --- a ledger of a newer release is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["api --port 0", "worker --engine simulated", "up --engine simulated --port 0"])
def test_whoever_starts_on_a_ledger_of_a_newer_release_is_refused_in_one_line(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, command: str
) -> None:
    redis_client.set(keys.SCHEMA, NEXT)
    settings = {"CARPOOL_REDIS_URL": redis_url, "CARPOOL_DATA_DIR": str(tmp_path / "data")}
    done = carpool(*command.split(), settings=settings)
    assert done.stderr.splitlines()[-1] == f"Error: {ADVICE}"
    assert done.returncode == ExitCode.PRECONDITION


def test_up_refuses_the_data_dir_of_a_newer_release(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        instance.ready()
        with redis.Redis.from_url(instance.redis_url()) as client:
            client.set(keys.SCHEMA, NEXT)
        instance.interrupt()
        assert instance.process.wait(60) == ExitCode.OK
    with Instance(tmp_path) as instance:
        assert instance.process.wait(60) == ExitCode.PRECONDITION
        assert instance.output.splitlines()[-1] == f"Error: {ADVICE}"
