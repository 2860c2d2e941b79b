"""`carpool up` as a user runs it: one command, real processes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
import redis

from ops.errors import ExitCode
from tests.instance import CARPOOL, Instance, carpool, ended, plain_environment, until
from tests.receiver import SECRET, Receiver
from tests.redis_server import RedisServer
from worker.simulation import completion

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance that tests look at and do not harm."""
    with Instance(tmp_path_factory.mktemp("instance")) as instance:
        yield instance.ready()


def all_end(pids: set[int]) -> None:
    until(lambda: all(map(ended, pids)), "every process has ended")


# --- a running instance -----------------------------------------------------------------------------------------------


def test_the_phases_are_shown_and_the_box_ends_them(instance: Instance) -> None:
    lines = instance.output.splitlines()
    order = [next(n for n, line in enumerate(lines) if line.startswith(what)) for what in ("redis: emb", "api: http")]
    ready = next(n for n, line in enumerate(lines) if line.startswith("Carpool is ready: simulated"))
    assert order == sorted(order)
    assert order[-1] < ready
    assert any(line.startswith("worker-1: ready: simulated on") for line in lines[:ready])
    assert f"  page      {instance.api_url()}/" in lines[ready:]
    assert f"  API docs  {instance.api_url()}/docs" in lines[ready:]
    assert "\x1b" not in instance.output


def test_the_command_in_the_box_can_be_pasted(instance: Instance) -> None:
    command = next(line for line in instance.output.splitlines() if line.startswith("curl -N "))
    assert command.startswith(f"curl -N {instance.api_url()}/generate_stream ")
    body = json.loads(command.split(" -d ")[1].strip("'"))
    with httpx2.stream("POST", f"{instance.api_url()}/generate_stream", json=body, timeout=30) as answer:
        events = [json.loads(event.data) for event in httpx2.EventSource(answer)]
    assert len("".join(event["token"] for event in events).split()) == 20


def test_status_lists_every_process(instance: Instance) -> None:
    done = instance.run("status", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == ExitCode.OK
    roles = [process["role"] for process in found]
    assert roles == ["supervisor", "redis", "api", "worker", "model-worker"]
    assert {process["state"] for process in found} == {"running", "ready"}
    assert len({process["pid"] for process in found}) == 5
    assert not any(ended(process["pid"]) for process in found)
    worker = found[3]
    assert (worker["name"], worker["engine"], worker["slots"]) == ("worker-1", "simulated", 4)
    assert instance.run("status").stdout.splitlines()[0].split() == ["ROLE", "NAME", "PID", "STATE", "DETAIL"]


def test_generate_streams_what_the_engine_says(instance: Instance) -> None:
    done = instance.run("generate", "Hello, I am", "--seed", "3", "--max-tokens", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == completion("Hello, I am", 3, 12) + "\n"


def test_generate_reads_a_prompt_from_standard_input(instance: Instance) -> None:
    arguments = ("generate", "-", "--seed", "3", "--max-tokens", "2", "--data-dir", str(instance.data_dir))
    assert carpool(*arguments, stdin="a\nb").stdout == completion("a\nb", 3, 2) + "\n"


def test_generate_says_what_the_api_refused(instance: Instance) -> None:
    done = instance.run("generate", "Hello", "--temperature", "9")
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith("Error: ")
    assert "temperature" in done.stderr


def test_generate_says_why_a_job_failed(instance: Instance) -> None:
    done = instance.run("generate", "[[raise]]@3", "--max-tokens", "9")
    assert done.returncode == ExitCode.FAILED
    assert len(done.stdout.split()) == 2
    assert "carpool jobs show" in done.stderr


def test_ctrl_c_cancels_a_generation(instance: Instance) -> None:
    with subprocess.Popen(
        [CARPOOL, "generate", "long", "--max-tokens", "4000", "--data-dir", str(instance.data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert errors.startswith("Cancelled job ")
    job = json.loads(instance.run("jobs show", errors.split()[-1].rstrip("."), "--json").stdout)
    assert job["status"] == "cancelled"


def test_jobs_are_listed_shown_and_cancelled(instance: Instance) -> None:
    submitted = httpx2.post(f"{instance.api_url()}/jobs", json={"prompt": "x", "max_tokens": 4000}, timeout=30).json()
    listed = instance.run("jobs").stdout
    assert listed.splitlines()[0].split()[:3] == ["ID", "STATUS", "MODEL"]
    assert submitted["id"] in listed
    assert instance.run("jobs cancel", submitted["id"]).stdout.startswith(f"{submitted['id']}: cancel")
    shown = json.loads(httpx2.get(f"{instance.api_url()}/jobs/{submitted['id']}?wait=20", timeout=30).text)
    assert shown["status"] == "cancelled"
    unknown = instance.run("jobs show", "nothing")
    assert unknown.returncode == ExitCode.FAILED
    assert "nothing" in unknown.stderr


def test_the_files_of_an_instance_are_private(instance: Instance) -> None:
    for folder in (instance.data_dir, instance.data_dir / "redis", instance.data_dir / "logs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (instance.data_dir / "run.json", instance.data_dir / "redis" / "redis.conf"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_embedded_redis_writes_every_change_and_evicts_nothing(instance: Instance) -> None:
    with redis.Redis.from_url(instance.redis_url(), decode_responses=True) as client:
        assert client.info("persistence")["aof_enabled"] == 1
        assert client.info("memory")["maxmemory_policy"] == "noeviction"


def test_a_second_instance_on_the_same_data_dir_is_refused(instance: Instance) -> None:
    done = instance.run("up", "--engine", "simulated", "--port", "0")
    assert done.returncode == ExitCode.PRECONDITION
    assert f"(process {instance.process.pid})" in done.stderr


# --- what dies --------------------------------------------------------------------------------------------------------


def test_a_stream_outlives_the_death_of_every_process_in_turn(tmp_path: Path) -> None:
    settings = {
        "CARPOOL_LEASE_S": "3",
        "CARPOOL_RENEW_S": "0.5",
        "CARPOOL_GRACE_S": "1",
        "CARPOOL_SIMULATED_STEP_MS": "50",
    }
    with Instance(tmp_path, settings=settings) as instance:
        instance.ready()
        arguments = ["generate", "Hello", "--seed", "5", "--max-tokens", "400", "--data-dir", str(instance.data_dir)]
        # Unbuffered: `communicate` does not give what a buffer has read ahead.
        with subprocess.Popen(
            [CARPOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=plain_environment()
        ) as stream:
            assert stream.stdout is not None
            text = stream.stdout.read(12)
            for role in ("api", "model-worker", "worker", "redis"):
                victim = instance.pid(role)
                os.kill(victim, signal.SIGKILL)
                until(lambda victim=victim: ended(victim), f"the {role} has died")  # type: ignore[misc]
                until(
                    lambda: {process["state"] for process in instance.status()} <= {"running", "ready"},
                    f"all runs again after the {role} was killed",
                )
            rest, errors = stream.communicate(timeout=90)
        assert (stream.returncode, errors) == (0, b"")
        assert (text + rest).decode() == completion("Hello", 5, 400) + "\n"
        assert "worker-1 died (killed by SIGKILL): it is started again" in instance.output


def test_what_cannot_work_is_given_up_with_its_cause(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with Instance(tmp_path, "--engine", "transformers", "--model", str(model)) as instance:
        assert instance.process.wait(90) == ExitCode.FAILED
        last = instance.output.splitlines()[-1]
        assert last.startswith("Error: worker-1 ended before it could work (exit code 3)")
        assert str(model) in instance.output
        all_end(instance.all_pids())


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_drains_in_order_and_leaves_no_process(tmp_path: Path, sig: signal.Signals) -> None:
    with Instance(tmp_path) as instance:
        pids = instance.ready().all_pids()
        assert len(pids) >= 6
        instance.interrupt(sig)
        assert instance.process.wait(60) == ExitCode.OK
        all_end(pids)
        assert "Draining: riding sequences get up to 30 s. Ctrl-C stops at once." in instance.output
        assert instance.output.endswith("Stopped.\n")
        states = {process["name"]: process["state"] for process in instance.status()}
        assert set(states.values()) == {"stopped"}
        assert instance.run("status").returncode == ExitCode.NOT_RUNNING
        log = (instance.data_dir / "logs" / "supervisor.log").read_text()
        lines = [json.loads(line) for line in log.splitlines()]
        ends = [line["process"] for line in lines if line.get("state") == "stopped"]
        assert ends == ["worker-1", "api", "redis", "supervisor"]


def test_stop_drains_the_instance(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        pids = instance.ready().all_pids()
        done = instance.run("stop")
        assert (done.returncode, done.stdout) == (0, "Stopped.\n")
        assert instance.process.wait(10) == ExitCode.OK
        all_end(pids)


def test_a_second_signal_stops_at_once_and_the_job_goes_on_at_the_next_start(tmp_path: Path) -> None:
    settings = {"CARPOOL_LEASE_S": "2", "CARPOOL_RENEW_S": "0.5", "CARPOOL_GRACE_S": "1"}
    with Instance(tmp_path, settings=settings) as instance:
        instance.ready()
        body = {"prompt": "Hello", "seed": 4, "max_tokens": 500}
        job = httpx2.post(f"{instance.api_url()}/jobs", json=body, timeout=30).json()["id"]
        until(lambda: bool(httpx2.get(f"{instance.api_url()}/jobs/{job}", timeout=30).json()["text"]), "the job rides")
        pids = instance.all_pids()
        instance.interrupt()
        until(lambda: "Draining" in instance.output, "it drains")
        instance.interrupt()
        assert instance.process.wait(30) == ExitCode.INTERRUPTED
        all_end(pids)

        instance.output_path.unlink()
        instance.start().ready()
        end = httpx2.get(f"{instance.api_url()}/jobs/{job}?wait=60", timeout=70).json()
        assert (end["status"], end["text"]) == ("succeeded", completion("Hello", 4, 500))


def test_a_killed_supervisor_leaves_no_process_and_the_next_one_starts(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        pids = instance.ready().all_pids()
        os.kill(instance.process.pid, signal.SIGKILL)
        instance.process.wait()
        all_end(pids)
        states = {process["role"]: process["state"] for process in instance.status()}
        assert states["supervisor"] == "dead"
        instance.output_path.unlink()
        instance.start().ready()


def test_status_works_while_redis_is_dead(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        instance.ready()
        os.kill(instance.process.pid, signal.SIGSTOP)  # nobody starts it again
        try:
            os.kill(instance.pid("redis"), signal.SIGKILL)
            until(lambda: instance.status()[1]["pid"] is None, "redis is gone")
            done = instance.run("status")
            assert done.returncode == ExitCode.NOT_READY
            assert "model-worker" in done.stdout
        finally:
            os.kill(instance.process.pid, signal.SIGCONT)


# --- other ways to run it ---------------------------------------------------------------------------------------------


def test_two_workers_on_a_server_that_was_named(tmp_path: Path, own_redis: RedisServer) -> None:
    with Instance(tmp_path, "--workers", "2", "--redis-url", own_redis.url, "--max-batch-size", "3") as instance:
        instance.ready()
        found = instance.status()
        assert [(process["role"], process["name"]) for process in found] == [
            ("supervisor", "supervisor"),
            ("redis", "redis"),
            ("api", "api"),
            ("worker", "worker-1"),
            ("model-worker", "worker-1/model"),
            ("worker", "worker-2"),
            ("model-worker", "worker-2/model"),
        ]
        assert [process["slots"] for process in found if process["role"] == "worker"] == [3, 3]
        assert found[1]["pid"] is None
        pids = instance.all_pids()
        instance.interrupt()
        assert instance.process.wait(60) == ExitCode.OK
        all_end(pids)
        with own_redis.client() as client:
            assert client.ping()


def test_flower_asks_for_the_password_that_is_shown(tmp_path: Path) -> None:
    with Instance(tmp_path, "--flower") as instance:
        instance.ready()
        row = next(line.split() for line in instance.output.splitlines() if line.startswith("  Flower"))
        url, password = row[1], row[-1].rstrip(")")
        for path in ("", "/workers", "/tasks", "/broker", "/metrics", "/api/workers", "/api/tasks", "/task/x"):
            assert httpx2.get(f"{url}{path}", timeout=20).status_code == 401, path
        for path in ("", "/metrics"):
            answer = httpx2.get(f"{url}{path}", auth=("carpool", password), timeout=20, follow_redirects=True)
            assert answer.status_code == 200
        assert "flower" in [process["role"] for process in instance.status()]
        pids = instance.all_pids()
        instance.interrupt(signal.SIGTERM)
        assert instance.process.wait(60) == ExitCode.OK
        all_end(pids)


def test_with_a_secret_webhooks_are_delivered_by_a_process_of_their_own(tmp_path: Path) -> None:
    settings = {"CARPOOL_WEBHOOK_SECRET": SECRET, "CARPOOL_WEBHOOK_ALLOW_PRIVATE": "1"}
    with Receiver() as receiver, Instance(tmp_path, settings=settings) as instance:
        instance.ready()
        roles = [process["role"] for process in instance.status()]
        assert roles == ["supervisor", "redis", "api", "worker", "model-worker", "webhooks"]
        assert instance.run("status").returncode == ExitCode.OK

        body = {"prompt": "Hello, I am", "max_tokens": 5, "webhook_url": receiver.url}
        id = httpx2.post(f"{instance.api_url()}/jobs", json=body, timeout=30).json()["id"]
        (request,) = receiver.wait_for(1)
        assert (request.event()["type"], request.event()["data"]["id"]) == ("job.succeeded", id)

        killed = instance.pid("webhooks")
        psutil.Process(killed).kill()
        until(lambda: webhooks_state(instance) == "running" and instance.pid("webhooks") != killed, "it is back", 60)
        httpx2.post(f"{instance.api_url()}/jobs", json=body, timeout=30)
        receiver.wait_for(2)

        with_secret = {name for name in ("api", "worker", "webhooks") if SECRET in environment_of(instance.pid(name))}
        assert with_secret == {"api", "webhooks"}
        assert SECRET not in "".join(path.read_text() for path in (instance.data_dir / "logs").iterdir())
        pids = instance.all_pids()
        instance.interrupt(signal.SIGTERM)
        assert instance.process.wait(60) == ExitCode.OK
        all_end(pids)


def test_a_worker_of_webhooks_that_hangs_is_seen(tmp_path: Path) -> None:
    with Instance(tmp_path, settings={"CARPOOL_WEBHOOK_SECRET": SECRET}) as instance:
        instance.ready()
        psutil.Process(instance.pid("webhooks")).suspend()
        until(lambda: webhooks_state(instance) == "stalled", "it is seen to hang")
        assert instance.run("status").returncode == ExitCode.NOT_READY
        psutil.Process(instance.pid("webhooks")).resume()
        until(lambda: webhooks_state(instance) == "running", "it goes on")


def webhooks_state(instance: Instance) -> str:
    return str(next(process["state"] for process in instance.status() if process["role"] == "webhooks"))


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


def test_it_starts_in_a_folder_that_has_packages_of_the_same_names(tmp_path: Path) -> None:
    for package in ("api", "tasks", "worker", "ops"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    with Instance(tmp_path) as instance:
        instance.ready()
        instance.interrupt()
        assert instance.process.wait(60) == ExitCode.OK


def test_a_worker_alone_says_whether_it_lives(own_redis: RedisServer) -> None:
    settings = {"CARPOOL_REDIS_URL": own_redis.url, "CARPOOL_ENGINE": "simulated"}
    assert carpool("health", "worker", "--name", "solo", settings=settings).returncode == ExitCode.FAILED
    worker = subprocess.Popen([CARPOOL, "worker", "--name", "solo"], env=plain_environment(settings))
    try:
        until(
            lambda: carpool("health", "worker", "--name", "solo", settings=settings).stdout == "solo: ready\n",
            "the worker is ready",
        )
        worker.terminate()
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
