"""What the operations guide tells to do, done: a copy of the ledger, a restricted user of Redis, a full server."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import httpx2
import pytest
import redis

from tests.api_server import running_api
from tests.documented_shell import Shell, blocks_of
from tests.instance import Instance, plain_environment
from tests.redis_server import RedisServer
from tests.service import Service, eventually, simulated_text

GUIDE = Path(__file__).parent.parent / "docs" / "operations.md"
pytestmark = pytest.mark.timeout(180)


def section(title: str) -> str:
    """The part of the guide under a heading."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", GUIDE.read_text(), re.M | re.S)
    assert found is not None, f"the guide has no section {title}"
    return found[1]


def text_of(job: httpx2.Response) -> str:
    return str(job.json()["text"])


def test_a_copy_taken_while_it_runs_is_a_ledger_that_goes_on(tmp_path: Path) -> None:
    (copy,) = blocks_of(section("Backup"))
    with Instance(tmp_path, settings={"CARPOOL_SIMULATED_STEP_MS": "20"}) as instance:
        instance.ready()
        with httpx2.Client(base_url=instance.api_url(), timeout=60, trust_env=False) as client:
            early = client.post("/jobs", json={"prompt": "early", "seed": 1, "max_tokens": 5}).json()["id"]
            assert client.get(f"/jobs/{early}?wait=30").json()["status"] == "succeeded"
            key = {"Idempotency-Key": "order-17"}
            body = {"prompt": "half", "seed": 2, "max_tokens": 300}
            half = client.post("/jobs", json=body, headers=key).json()["id"]
            eventually("it has tokens", lambda: client.get(f"/jobs/{half}").json()["usage"]["completion_tokens"] > 20)
            given = {
                **plain_environment(),
                "REDIS_URL": instance.redis_url(),
                "REDIS_DIR": str(tmp_path / "data/redis"),
            }
            with Shell(tmp_path, tmp_path, given) as shell:
                num_failed, output = shell.run(redis_cli(tmp_path) + copy.commands, 60)
            assert num_failed == 0, output
            late = client.post("/jobs", json={"prompt": "late", "seed": 3, "max_tokens": 5}).json()["id"]
            assert client.get(f"/jobs/{half}?wait=60").json()["status"] == "succeeded"
            assert client.get(f"/jobs/{late}?wait=60").json()["status"] == "succeeded"
        assert instance.run("stop").returncode == 0
        assert instance.process.wait(60) == 0
        shutil.rmtree(tmp_path / "data/redis/appendonlydir")
        shutil.copytree(tmp_path / "backup/appendonlydir", tmp_path / "data/redis/appendonlydir")
        instance.output_path.unlink()
        instance.start().ready()
        with httpx2.Client(base_url=instance.api_url(), timeout=60, trust_env=False) as client:
            assert text_of(client.get(f"/jobs/{early}")) == simulated_text("early", 1, 5)
            again = client.get(f"/jobs/{half}?wait=60").json()
            assert again["status"] == "succeeded"
            assert again["text"] == simulated_text("half", 2, 300)
            assert again["attempts"] == 2, "it went on from where the copy had it"
            assert client.post("/jobs", json=body, headers=key).json()["id"] == half
            assert client.get(f"/jobs/{late}").status_code == 404, "what came after the copy never was"


def redis_cli(folder: Path) -> str:
    """`redis-cli` for a machine that has none: the guide needs CONFIG SET and INFO of it alone."""
    script = folder / "redis_cli.py"
    script.write_text(
        "import sys, redis\n"
        "client = redis.Redis.from_url(sys.argv[2], decode_responses=True)\n"
        "connection = client.connection_pool.get_connection()\n"
        "connection.send_command(*sys.argv[3:])\n"
        "answer = connection.read_response()\n"
        "print(answer.decode() if isinstance(answer, bytes) else answer)\n"
    )
    return f'redis-cli() {{ {sys.executable} {script} "$@"; }}\n'


def test_a_user_of_redis_with_these_rights_is_enough(tmp_path: Path) -> None:
    found = re.search(r"^ACL SETUSER carpool (.*)$", section("Redis"), re.M)
    assert found is not None
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "carpool", *found[1].replace("PASSWORD", "secret").split())
        url = f"redis://carpool:secret@127.0.0.1:{server.port}/0"
        with Service(url, tmp_path) as service:
            service.worker()
            with running_api(service.settings) as api, api.client() as http:
                job = http.post("/jobs", json={"prompt": "x", "seed": 4, "max_tokens": 5}).json()["id"]
                assert text_of(http.get(f"/jobs/{job}?wait=30")) == simulated_text("x", 4, 5)
                with http.stream("GET", f"/jobs/{job}/stream") as stream:
                    assert "5.end" in stream.read().decode()
                assert http.get("/health/accepting").status_code == 200
                assert http.get("/health/ready").status_code == 200
                assert http.delete(f"/jobs/{job}").status_code == 204
        with redis.Redis.from_url(url, socket_timeout=5) as limited:
            for forbidden in ("FLUSHALL", "SHUTDOWN", "CONFIG GET *", "KEYS *"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    limited.execute_command(*forbidden.split())


def test_a_full_redis_refuses_new_jobs_and_takes_them_again_when_there_is_room(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server, server.client() as client, Service(server.url, tmp_path) as service:
        service.worker()
        with running_api(service.settings) as api, api.client() as http:
            rides = http.post("/jobs", json={"prompt": "rides", "seed": 5, "max_tokens": 20}).json()["id"]
            assert http.get(f"/jobs/{rides}?wait=30").json()["status"] == "succeeded"
            client.config_set("maxmemory", "500kb")
            refused = http.post("/jobs", json={"prompt": "x" * 10_000})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_full")
            assert int(refused.headers["retry-after"]) > 0
            assert http.get("/health/accepting").status_code == 503
            assert http.delete(f"/jobs/{rides}").status_code == 204, "deleting makes room also now"
            client.config_set("maxmemory", 0)
            assert http.post("/jobs", json={"prompt": "x", "max_tokens": 1}).status_code == 202
