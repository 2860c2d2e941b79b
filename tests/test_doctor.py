"""Each precondition, really broken: one line with cause and remedy before anything is loaded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.checks import preconditions
from ops.errors import ExitCode, PreconditionError
from ops.preflight import check_python
from tasks.settings import Settings
from tests.fake_hub import FakeHub
from tests.instance import Instance, carpool
from tests.missing import give_up
from tests.redis_server import RedisServer, free_port
from tests.tiny_models import save_tiny_model, write_hole

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(120)


def doctor(folder: Path, *options: str, **settings: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Its exit code, and its findings by name; the simulated engine unless an option says another."""
    arguments = (
        "doctor",
        "--json",
        "--data-dir",
        str(folder / "data"),
        "--port",
        "0",
        "--engine",
        "simulated",
        *options,
    )
    done = carpool(*arguments, settings=settings)
    assert "Traceback" not in done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    assert not (folder / "data" / "run.json").exists() or "instance" in found[0]["check"]
    return done.returncode, {finding["check"]: finding for finding in found}


def broken(folder: Path, check: str, *options: str, **settings: str) -> str:
    """Cause and remedy of the one thing that is broken; `up` refuses with the same words and starts nothing."""
    code, found = doctor(folder, *options, **settings)
    states = {name: finding["state"] for name, finding in found.items()}
    assert [name for name, state in states.items() if state == "broken"] == [check], found
    assert code == ExitCode.FAILED
    finding = found[check]
    text = f"{finding['detail']}. {finding['remedy']}" if finding["remedy"] else finding["detail"]
    arguments = ("up", "--data-dir", str(folder / "data"), "--port", "0", "--engine", "simulated", *options)
    refused = carpool(*arguments, settings=settings)
    assert refused.returncode in (ExitCode.PRECONDITION, ExitCode.USAGE), refused.stdout + refused.stderr
    assert refused.stderr.splitlines() == [f"Error: {text}"]
    assert not (folder / "data" / "run.json").exists(), "something was started"
    return text


def test_where_all_is_well_it_says_so_in_lines_and_in_json(tmp_path: Path) -> None:
    code, found = doctor(tmp_path)
    assert code == ExitCode.OK
    assert set(found) == {
        "instance",
        "python",
        "packages",
        "model",
        "access",
        "disk",
        "webhooks",
        "devices",
        "redis",
        "port",
        "flower",
        "persistence",
        "descriptors",
    }
    assert all(finding["state"] in ("ok", "warning") and finding["detail"] for finding in found.values())
    assert not (tmp_path / "data").exists(), "it looks and makes nothing"
    done = carpool("doctor", "--engine", "simulated", "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert done.returncode == ExitCode.OK
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(found)


def test_of_a_running_instance_its_own_port_and_server_are_looked_at(tmp_path: Path) -> None:
    with Instance(tmp_path, "--flower") as instance:
        instance.ready()
        code, found = doctor(tmp_path, "--flower")
        assert code == ExitCode.OK, found
        assert instance.api_url() in found["instance"]["detail"]
        assert found["port"]["detail"] == f"{instance.api_url()} is this instance's own, and takes jobs"
        assert found["redis"]["detail"].startswith("redis://:***@127.0.0.1:")
        assert found["flower"]["detail"] == "runs"


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = broken(tmp_path, "port", "--port", str(port))
    assert text.startswith(f"Port {port} is in use by process {os.getpid()} (")
    assert text.endswith("Name another one with --port; --port 0 takes a free one")


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    port = free_port()
    code, found = doctor(tmp_path, "--redis-url", f"redis://:hidden@127.0.0.1:{port}/0")
    assert code == ExitCode.FAILED
    assert found["redis"]["state"] == "broken"
    assert f"Redis at redis://:***@127.0.0.1:{port}/0 does not answer" in found["redis"]["detail"]
    assert "Start it, or set CARPOOL_REDIS_URL" in found["redis"]["detail"]
    assert found["persistence"]["state"] == "warning"


def test_a_redis_that_refuses_the_password(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", extra=()) as server:
        with server.client() as client:
            client.config_set("requirepass", "right")
        url = f"redis://:wrong@127.0.0.1:{server.port}/0"
        _, found = doctor(tmp_path, "--redis-url", url)
        assert found["redis"]["state"] == "broken"
        assert "password" in found["redis"]["detail"].lower()
        assert "wrong" not in json.dumps(found)
        arguments = ("up", "--engine", "simulated", "--port", "0", "--data-dir", str(tmp_path / "data"))
        refused = carpool(*arguments, "--redis-url", url)
        assert refused.returncode == ExitCode.PRECONDITION
        assert refused.stderr.splitlines() == [f"Error: {found['redis']['detail']}"]


def test_a_redis_that_evicts_what_it_was_given(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", extra=("--maxmemory-policy", "allkeys-lru")) as server:
        text = broken(tmp_path, "redis", "--redis-url", server.url)
    assert "has maxmemory-policy allkeys-lru, which deletes accepted jobs" in text
    assert "Run: redis-cli CONFIG SET maxmemory-policy noeviction" in text


def test_a_redis_that_forgets_at_its_end_is_a_warning(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", extra=("--appendonly", "no")) as server:
        code, found = doctor(tmp_path, "--redis-url", server.url)
    assert code == ExitCode.OK
    assert (found["redis"]["state"], found["persistence"]["state"]) == ("ok", "warning")
    assert "CONFIG SET appendonly yes" in found["persistence"]["remedy"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "carpool-test", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        give_up("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_without_room(full_disk: Path) -> None:
    text = broken(full_disk, "disk")
    assert text.startswith(f"{full_disk}/data has 64 MB of free disk space, at least 256 MB are needed. Make room")


def test_a_data_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    code, found = doctor(tmp_path)
    assert code == ExitCode.FAILED
    assert found["disk"]["detail"] == f"The data dir {tmp_path}/data cannot be used: {tmp_path}/data is no folder"


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    text = broken(tmp_path, "model", "--engine", "transformers", "--model", str(tmp_path / "no-model"))
    assert text.startswith(f"There is no model at {tmp_path}/no-model. Name a folder or a GGUF file")


def hub(folder: Path, **more: str) -> dict[str, Any]:
    return {"HF_HOME": str(folder / "hub"), **more}


def test_a_model_of_the_hub_that_may_not_be_fetched(tmp_path: Path) -> None:
    options = ("--engine", "transformers", "--model", "somebody/model")
    text = broken(tmp_path, "model", *options, **hub(tmp_path, HF_HUB_OFFLINE="1"))
    assert text.startswith(
        "The model somebody/model is not on this machine, and HF_HUB_OFFLINE forbids to fetch it. Unset"
    )


@pytest.mark.parametrize(
    ("status", "code", "token", "cause", "remedy"),
    [
        (401, "GatedRepo", "", "(401): it is gated or private", "Set HF_TOKEN"),
        (403, "GatedRepo", "hf_given", "(403): it is gated or private", "Ask for access on the model's page"),
        (403, "", "hf_given", "(403): it is gated or private", "Ask for access on the model's page"),
        (404, "RepoNotFound", "", "The hub has no model somebody/model", "Check the name"),
        (404, "RevisionNotFound", "", "has no revision 'main'", "Set CARPOOL_REVISION"),
        (404, "EntryNotFound", "", "has no config.json", "Take one in transformers' format"),
        (500, "", "", "The hub answers 500", "Try again later"),
    ],
)
def test_a_model_that_the_hub_does_not_give(
    tmp_path: Path, status: int, code: str, token: str, cause: str, remedy: str
) -> None:
    with FakeHub(status, code) as fake:
        environment = hub(tmp_path, HF_ENDPOINT=fake.url, **({"HF_TOKEN": token} if token else {}))
        text = broken(tmp_path, "model", "--engine", "transformers", "--model", "somebody/model", **environment)
    assert cause in text
    assert f". {remedy}" in text
    asked = {authorization for path, authorization in fake.asked if path == "/somebody/model/resolve/main/config.json"}
    assert asked == {f"Bearer {token}" if token else ""}
    assert "hf_given" not in text


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    environment = hub(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    text = broken(tmp_path, "model", "--engine", "transformers", "--model", "somebody/model", **environment)
    assert "is not on this machine, and the hub cannot be reached (" in text


def test_a_model_that_is_larger_than_the_memory(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "huge")
    write_hole(folder / "model.safetensors")
    code, found = doctor(tmp_path, "--engine", "transformers", "--device", "cpu", "--model", str(folder))
    assert code == ExitCode.FAILED
    assert [name for name, finding in found.items() if finding["state"] == "broken"] == ["memory"]
    assert f"model {str(folder)!r} needs " in found["memory"]["detail"]
    assert "Take a smaller model, lower CARPOOL_MAX_BATCH_SIZE" in found["memory"]["detail"]


def test_the_bundled_model_has_room() -> None:
    done = carpool("doctor", "--json", "--port", "0")
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["memory"]["state"] == "ok", found["memory"]
    assert "SmolLM2-135M-Instruct in " in found["memory"]["detail"]


# --- the installation ------------------------------------------------------------------------------------------------


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    """An interpreter in which torch cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    options = ("--engine", "transformers")
    text = broken(tmp_path, "packages", *options, PYTHONPATH=str(tmp_path))
    assert text.startswith("The engine transformers needs torch, which this Python does not have. Run: pip install")


def test_a_python_that_is_too_old() -> None:
    with pytest.raises(PreconditionError, match=r"This is Python 3\.10\.9, Carpool needs 3\.11 or newer"):
        check_python((3, 10, 9))


def test_the_start_script_refuses_an_old_python_before_it_installs_anything(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        # an interpreter of 3.9, as far as the script asks it
        (programs / name).write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 1 ;; esac\necho "Python 3.9.2"\n')
        (programs / name).chmod(0o755)
    for tool in ("bash", "env", "dirname", "uname", "cat"):
        (programs / tool).symlink_to(
            subprocess.run(["which", tool], check=True, capture_output=True, text=True).stdout.strip()
        )
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "CARPOOL_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "ops/up")], check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == ExitCode.PRECONDITION
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: no Python 3.11 or newer is on the PATH. Install one (Debian, Ubuntu: apt install ")
    assert line.endswith(", or name it in CARPOOL_PYTHON")
    assert not (tmp_path / "venv").exists()


def test_up_and_doctor_look_at_the_same_things(tmp_path: Path) -> None:
    named = [check.name for check in preconditions(Settings(engine="simulated", data_dir=tmp_path))]
    _, found = doctor(tmp_path)
    assert [name for name in found if name in named] == named
