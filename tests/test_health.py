"""`carpool health`: each part's own word, in time for a probe, and what a probe shall do while Redis is away."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ops.errors import ExitCode
from tasks.redis_clients import connect
from tasks.settings import Settings
from tests.api_server import running_api
from tests.instance import CARPOOL, carpool, plain_environment, until
from tests.receiver import SECRET
from tests.redis_server import RedisServer, free_port
from tests.service import Service

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def service(own_redis: RedisServer, tmp_path: Path) -> Iterator[Service]:
    with Service(own_redis.url, tmp_path) as service:
        yield service


def health(url: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return carpool("health", *arguments, settings={"CARPOOL_REDIS_URL": url, **settings})


def test_a_worker_is_known_by_its_own_heartbeat(service: Service, own_redis: RedisServer) -> None:
    absent = health(own_redis.url, "worker", "--name", "worker-1")
    assert absent.returncode == ExitCode.FAILED
    assert absent.stderr == f"Error: No heartbeat of worker-1 on {socket.gethostname()}. Look at the worker's log\n"
    service.worker()
    for option in ((), ("--ready",), ("--live",)):
        done = health(own_redis.url, "worker", "--name", "worker-1", *option)
        assert (done.returncode, done.stdout) == (0, "worker-1: ready\n")
    assert health(own_redis.url, "worker", "--name", "another").returncode == ExitCode.FAILED


def test_a_worker_of_another_machine_does_not_count(service: Service, own_redis: RedisServer) -> None:
    service.worker()
    (beat,) = service.list_workers()
    with connect(service.settings) as client:
        client.hset(f"{{carpool}}:w:{beat.incarnation}", "host", "elsewhere")
        done = health(own_redis.url, "worker", "--name", "worker-1")
    assert done.returncode == ExitCode.FAILED


def test_a_worker_that_loads_lives_and_is_not_ready(service: Service, own_redis: RedisServer) -> None:
    service.worker()
    (beat,) = service.list_workers()
    service.workers[0].end()
    with connect(service.settings) as client:
        client.hset(f"{{carpool}}:w:{beat.incarnation}", "state", "loading")
        assert health(own_redis.url, "worker", "--name", "worker-1").stdout == "worker-1: loading\n"
        ready = health(own_redis.url, "worker", "--name", "worker-1", "--ready")
        assert (ready.returncode, ready.stderr) == (
            ExitCode.NOT_READY,
            "Error: worker-1: loading. Wait until its model is loaded\n",
        )
        client.hset(f"{{carpool}}:w:{beat.incarnation}", "state", "broken")
        assert health(own_redis.url, "worker", "--name", "worker-1", "--live").returncode == ExitCode.FAILED


def test_while_redis_is_away_no_worker_is_restarted_for_it() -> None:
    url = f"redis://:hidden@127.0.0.1:{free_port()}/0"
    done = health(url, "worker", "--name", "w")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "hidden" not in done.stderr
    done = health(url, "worker", "--name", "w", "--live")
    assert (done.returncode, done.stdout) == (0, "w: not known, Redis does not answer\n")


def test_an_api_is_asked_what_it_can_do(service: Service, own_redis: RedisServer) -> None:
    with running_api(service.settings) as api:
        port = {"CARPOOL_PORT": str(urlsplit(api.url).port)}
        assert health(own_redis.url, "api", **port).stdout == "The API: 200\n"
        assert health(own_redis.url, "api", "--ready", **port).returncode == ExitCode.FAILED, "there is no worker"
        own_redis.kill()
        assert health(own_redis.url, "api", **port).returncode == ExitCode.FAILED
        assert health(own_redis.url, "api", "--live", **port).returncode == 0
    gone = health(own_redis.url, "api", "--live", **port)
    assert gone.returncode == ExitCode.FAILED
    assert f"does not answer at {api.url}/health/live" in gone.stderr


def test_a_worker_of_webhooks_is_known_by_its_own_word(own_redis: RedisServer) -> None:
    settings = {"CARPOOL_REDIS_URL": own_redis.url, "CARPOOL_WEBHOOK_SECRET": SECRET}
    assert health(own_redis.url, "webhooks", "--name", "hooks").returncode == ExitCode.FAILED
    worker = subprocess.Popen([CARPOOL, "webhooks", "--name", "hooks"], env=plain_environment(settings))
    try:
        until(lambda: health(own_redis.url, "webhooks", "--name", "hooks").returncode == 0, "it delivers")
        worker.terminate()
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("broker",), "'broker' is none of api"), (("api", "--ready", "--live"), "--ready and --live")],
)
def test_what_cannot_be_asked_is_a_usage_error(arguments: tuple[str, ...], named: str) -> None:
    done = carpool("health", *arguments)
    assert done.returncode == ExitCode.USAGE
    assert named in done.stderr


def test_a_probe_loads_neither_a_model_nor_the_api() -> None:
    code = (
        "import sys, ops.cli, ops.health; "
        "print([m for m in ('torch', 'transformers', 'celery', 'fastapi', 'api', 'worker') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_address_is_one_that_can_be_opened() -> None:
    from ops.health import check_health

    with pytest.raises(Exception, match=r"http://\[::1\]:1/health/accepting"):
        check_health(Settings(host="::", port=1), "api", "", 0, ready=False, without_redis=False)
