"""`carpool keys`, and the command line as a caller that has a key."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import redis

from ops.errors import ExitCode
from tasks import keys
from tasks.api_keys import KeyStore, digest_of
from tasks.settings import Settings
from tests.api_keys import make_key
from tests.api_process import ApiProcess
from tests.api_server import running_api
from tests.instance import Instance, carpool, until
from tests.scripted_owner import ScriptedOwner
from tests.service import Service

SECRET = re.compile(r"cpk_[A-Za-z0-9_-]{43}")


class Keys:
    """`carpool keys` on one server."""

    def __init__(self, redis_url: str) -> None:
        self._settings = {"CARPOOL_REDIS_URL": redis_url}

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = carpool("keys", *arguments, settings=self._settings)
        assert done.returncode == code, done.stderr + done.stdout
        return done

    def create(self, *arguments: str) -> str:
        """The secret of a new key, which is all that stands on standard output."""
        secret = self.run("create", *arguments).stdout.removesuffix("\n")
        assert SECRET.fullmatch(secret)
        return secret

    def list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("list", "--json").stdout)
        return found


@pytest.fixture
def command(redis_url: str) -> Keys:
    return Keys(redis_url)


def test_a_key_is_made_shown_once_listed_and_revoked(command: Keys, redis_client: redis.Redis) -> None:
    assert command.run("list").stdout.startswith("No keys")
    secret = command.create(
        "--name", "web", "--rpm", "60", "--tpm", "10000", "--max-concurrent", "4", "--models", "a,b",
        "--priority-ceiling", "normal", "--expires", "30d",
    )  # fmt: skip
    (key,) = command.list()
    assert {name: key[name] for name in ("name", "state", "source", "models", "revoked_at")} == {
        "name": "web",
        "state": "active",
        "source": "command",
        "models": ["a", "b"],
        "revoked_at": None,
    }
    limits = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "priority_ceiling")
    assert [key[name] for name in limits] == [60, 10000, 4, 5]
    assert abs(key["expires_at"] - time.time() - 30 * 86400) < 60
    listed = command.run("list").stdout
    for shown in (listed, json.dumps(key)):
        assert "web" in shown
        assert secret not in shown
        assert secret.removeprefix("cpk_") not in shown
        assert digest_of(secret) not in shown
    # Redis holds the hash alone, for ever
    assert {str(name) for name in redis_client.keys("*")} == {keys.API_KEYS, keys.API_KEYS_REVISION}
    assert redis_client.ttl(keys.API_KEYS) == redis_client.ttl(keys.API_KEYS_REVISION) == -1
    table = redis_client.hgetall(keys.API_KEYS)
    assert list(table) == [digest_of(secret)]
    assert secret not in json.dumps(table)
    assert "revoked" in command.run("revoke", key["id"]).stdout
    assert command.list()[0]["state"] == "revoked"
    # a second time changes nothing
    before = command.list()
    command.run("revoke", "web")
    assert command.list() == before


def test_json_holds_the_key_once(command: Keys) -> None:
    made = json.loads(command.run("create", "--name", "web", "--json").stdout)
    assert SECRET.fullmatch(made["key"])
    assert made["id"] == command.list()[0]["id"]
    assert "key" not in command.list()[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--name", "web", "--rpm", "0"), "rpm '0'"),
        (("--name", "web", "--rpm", "-1"), "rpm '-1'"),
        (("--name", "web", "--tpm", "1e3"), "tpm '1e3'"),
        (("--name", "web", "--max-concurrent", "many"), "max_concurrent 'many'"),
        (("--name", "web", "--models", " , "), "models ' , '"),
        (("--name", "web", "--priority-ceiling", "urgent"), "priority_ceiling 'urgent'"),
        (("--name", "web", "--expires", "soon"), "expires 'soon'"),
        (("--name", "web", "--expires", "2020-01-01"), "that time is over"),
        (("--name", "two words"), "no space"),
        (("--name", ""), "the name has 0 characters"),
        ((), "--name"),
    ],
)
def test_a_term_that_is_not_possible_is_refused_by_name(command: Keys, arguments: tuple[str, ...], says: str) -> None:
    done = command.run("create", *arguments, code=ExitCode.USAGE)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert command.list() == []


def test_a_key_that_is_not_there_and_a_name_of_two_are_refused(command: Keys) -> None:
    assert "There is no key 'web'" in command.run("revoke", "web", code=ExitCode.FAILED).stderr
    command.create("--name", "web")
    command.create("--name", "web")
    refused = command.run("revoke", "web", code=ExitCode.FAILED).stderr
    assert "2 keys have the name 'web'" in refused
    assert all(key["id"] in refused for key in command.list())


def test_without_redis_it_says_so(command: Keys) -> None:
    done = carpool("keys", "list", settings={"CARPOOL_REDIS_URL": "redis://:geheim@127.0.0.1:1/0"})
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "127.0.0.1:1/0 does not answer" in done.stderr
    assert "geheim" not in done.stderr


def test_a_key_is_rotated_and_its_jobs_stay_in_sight(command: Keys, redis_url: str) -> None:
    old = command.create("--name", "web", "--rpm", "60")
    settings = Settings(redis_url=redis_url, engine="simulated")
    with running_api(settings) as api, api.client() as client:

        def status(secret: str) -> int:
            return client.get("/jobs", headers={"Authorization": f"Bearer {secret}"}).status_code

        job = client.post("/jobs", json={"prompt": "x"}, headers={"Authorization": f"Bearer {old}"}).json()["id"]
        new = command.run("rotate", "web", "--keep", "1h").stdout.strip()
        until(lambda: status(new) == 200, "the new one is known")
        assert status(old) == 200
        answer = client.get(f"/jobs/{job}", headers={"Authorization": f"Bearer {new}"})
        assert answer.json()["id"] == job
        newest = command.run("rotate", "web").stdout.strip()
        until(lambda: status(newest) == 200, "the newest one is known")
        until(lambda: status(old) == status(new) == 401, "the others are good no more")
        found = command.list()
        assert len({key["id"] for key in found}) == 1
        assert [key["state"] for key in found] == ["revoked", "revoked", "active"]
        assert {key["requests_per_minute"] for key in found} == {60}


def test_what_a_revoked_key_has_left_behind_can_be_cancelled_with_it(command: Keys, redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    secret = command.create("--name", "web")
    with (
        running_api(settings) as api,
        api.client(headers={"Authorization": f"Bearer {secret}"}) as client,
        ScriptedOwner(settings) as owner,
    ):
        waiting, riding = (client.post("/jobs", json={"prompt": "x"}).json()["id"] for _ in range(2))
        ride = owner.claim(riding)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        upload: dict[str, Any] = {
            "files": {"file": ("in.jsonl", json.dumps(line).encode())},
            "data": {"purpose": "batch"},
        }
        file = client.post("/v1/files", **upload).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=body).json()["id"]
        assert "2 jobs cancelled" in command.run("revoke", "web", "--cancel").stdout
        assert owner.look(ride) == "cancelled"
        assert owner.client.hget(keys.record(waiting), "status") == "cancelled"
        until(lambda: owner.client.hget(keys.batch(batch), "status") == "cancelled", "the batch is cancelled")


def test_only_a_key_that_is_good_no_more_is_forgotten(command: Keys, redis_client: redis.Redis) -> None:
    command.create("--name", "web")
    assert "Revoke it first" in command.run("forget", "web", code=ExitCode.FAILED).stderr
    command.run("revoke", "web")
    command.run("forget", "web")
    assert command.list() == []
    assert KeyStore(redis_client).table() == {}


# --- the command line as a caller ------------------------------------------------------------------------------------


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with Instance(tmp_path) as instance:
        yield instance.ready()


def test_an_instance_with_keys_is_used_by_who_has_one_and_says_nothing_of_it(
    instance: Instance, tmp_path: Path
) -> None:
    made = instance.run("keys create", "--name", "web")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    with_key = {"CARPOOL_API_KEY": secret}
    data_dir = ("--data-dir", str(instance.data_dir))
    until(lambda: httpx2.get(f"{instance.api_url()}/jobs", trust_env=False).status_code == 401, "it asks for a key")

    refused = carpool("generate", "Hello, I am", *data_dir)
    assert refused.returncode == ExitCode.FAILED
    assert "set CARPOOL_API_KEY" in refused.stderr
    wrong = carpool("jobs", *data_dir, settings={"CARPOOL_API_KEY": "cpk_wrong"})
    assert "cpk_wrong" not in wrong.stderr
    assert wrong.returncode == ExitCode.FAILED

    done = carpool("generate", "a prompt that nobody sees", "--max-tokens", "5", *data_dir, settings=with_key)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    listed = carpool("jobs", "--json", *data_dir, settings=with_key)
    (job,) = json.loads(listed.stdout)["data"]
    assert carpool("jobs", "show", job["id"], *data_dir, settings=with_key).returncode == 0

    # the supervisor asks without one, and the instance is well
    assert {process["state"] for process in instance.status()} <= {"running", "ready"}
    shown = [instance.run("status").stdout, instance.run("status", "--json").stdout, instance.output]
    shown += [path.read_text(errors="replace") for path in instance.data_dir.rglob("*.log")]
    shown.append((instance.data_dir / "run.json").read_text())
    shown += [" ".join(psutil.Process(pid).cmdline()) for pid in instance.all_pids()]
    for text in shown:
        assert secret.removeprefix("cpk_") not in text
        assert "nobody sees" not in text


def test_a_misspelt_variable_does_not_show_what_may_be_a_key() -> None:
    for name in ("CARPOOL_API_KEYS", "CARPOOL_APIKEY", "CARPOOL_KEY"):
        done = carpool("status", settings={name: "cpk_secret"})
        assert done.returncode == ExitCode.USAGE
        assert name in done.stderr
        assert "cpk_secret" not in done.stderr


def test_up_serves_others_once_there_is_a_key(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        instance.ready()
        secret = instance.run("keys create", "--name", "web").stdout.strip()
        instance.interrupt()
        assert instance.process.wait(60) == ExitCode.OK
    (tmp_path / "up.out").unlink()
    with Instance(tmp_path, "--host", "0.0.0.0") as instance:
        instance.ready()
        url = f"{instance.api_url()}/jobs"
        assert httpx2.get(url, trust_env=False).status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        assert httpx2.get(url, headers=headers, trust_env=False).status_code == 200


def test_up_without_a_key_that_cannot_tell_before_is_ended_by_its_api(tmp_path: Path) -> None:
    with Instance(tmp_path) as instance:
        instance.ready()
        instance.interrupt()
        assert instance.process.wait(60) == ExitCode.OK
    with Instance(tmp_path, "--host", "0.0.0.0") as instance:
        assert instance.process.wait(60) == ExitCode.FAILED
        assert "CARPOOL_HOST=0.0.0.0: there is no API key" in instance.output


def test_the_api_alone_is_refused_for_others_without_a_key_in_one_line(command: Keys, redis_url: str) -> None:
    def serve(url: str) -> subprocess.CompletedProcess[str]:
        return carpool("api", "--host", "0.0.0.0", "--port", "0", settings={"CARPOOL_REDIS_URL": url})

    done = serve(redis_url)
    assert done.returncode == ExitCode.PRECONDITION
    (line,) = done.stderr.splitlines()
    assert "--host 0.0.0.0 would serve everyone" in line
    assert "carpool keys create" in line
    done = serve("redis://:geheim@127.0.0.1:1/0")
    assert done.returncode == ExitCode.PRECONDITION
    assert "does not tell whether there is one" in done.stderr
    assert "geheim" not in done.stderr


def test_a_file_of_keys_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = {"CARPOOL_API_KEYS_FILE": str(tmp_path / "nowhere"), "CARPOOL_DATA_DIR": str(tmp_path / "data")}
    for command in ("up --engine simulated --port 0", "api --port 0"):
        done = carpool(*command.split(), settings=settings)
        assert done.returncode == ExitCode.USAGE
        assert "nowhere: it cannot be read" in done.stderr.splitlines()[-1]


# --- logs ------------------------------------------------------------------------------------------------------------


def test_neither_keys_nor_prompts_are_in_the_logs_of_api_and_worker_at_debug_level(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    listed = "a-key-of-the-file-" + "x1" * 20
    file.write_text(f"listed {listed} rpm=5\n")
    holder = make_key(redis_client, "logged", rpm="20", max_concurrent="5")
    with Service(redis_url, tmp_path, log_level="debug", api_keys_file=str(file)) as service:
        worker = service.worker()
        with ApiProcess(service.settings, tmp_path) as api, httpx2.Client(base_url=api.url, trust_env=False) as client:
            prompt = "SECRET-PROMPT "
            for secret in (holder.secret, listed, f"wrong-{holder.secret}"):
                headers = {"Authorization": f"Bearer {secret}"}
                for path, body in (
                    ("/basic_generate", {"prompt": prompt, "max_tokens": 3}),
                    ("/basic_generate", {"prompt": f"{prompt}[[raise]]@2", "max_tokens": 3}),
                    ("/generate_stream", {"prompt": prompt, "max_tokens": 3}),
                    ("/jobs", {"prompt": prompt, "nonsense": prompt}),
                    ("/jobs", {"prompt": prompt, "max_tokens": -1}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3}),
                ):
                    client.post(path, json=body, headers=headers, timeout=30)
                half = f'{{"prompt": "{prompt}'
                client.post("/jobs", content=half, headers={**headers, "Content-Type": "application/json"})
                form: dict[str, Any] = {"files": {"file": ("in", prompt.encode())}, "data": {"purpose": "batch"}}
                client.post("/v1/files", headers=headers, **form)
            logs = {"api": api.log.read_text(), "worker": worker.log.read_text()}
    for name, text in logs.items():
        assert "debug" in text or "info" in text, name
        assert "SECRET-PROMPT" not in text, name
        for secret in (holder.secret, listed):
            assert secret.removeprefix("cpk_")[:20] not in text, name
            assert digest_of(secret) not in text, name
