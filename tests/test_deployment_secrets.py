"""Secrets in files: made once, read by the parts that need them, and shown nowhere."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import httpx2
import pytest

from ops.errors import ExitCode
from tasks.settings import SettingsError, load_settings
from tasks.webhook_secrets import webhook_secrets
from tests.instance import CARPOOL, carpool, plain_environment, until
from tests.redis_server import RedisServer, free_port


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_secret_is_made_once_and_not_shown(tmp_path: Path) -> None:
    done = carpool("make-secrets", str(tmp_path), "--redis-host", "redis:6380")
    assert done.returncode == 0
    first = contents(tmp_path)
    assert set(first) == {
        "redis/password",
        "redis/redis.conf",
        "redis/url",
        "webhooks/secret",
        "flower/password",
        "grafana/password",
    }
    assert not any(value.strip() in done.stdout for value in first.values())
    password = first["redis/password"].strip()
    assert first["redis/redis.conf"] == f"requirepass {password}\n"
    assert first["redis/url"] == f"redis://:{password}@redis:6380/0\n"
    assert len({value for name, value in first.items() if name.endswith("password")}) == 3

    (tmp_path / "flower/password").write_text("my own\n")
    (tmp_path / "redis/url").unlink()
    again = carpool("make-secrets", str(tmp_path), "--redis-host", "redis:6380")
    assert again.stdout == f"{tmp_path / 'redis/url'}: written\n"
    assert contents(tmp_path) == {**first, "flower/password": "my own\n"}


def test_two_installations_have_no_secret_in_common(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert carpool("make-secrets", str(tmp_path / name)).returncode == 0
    assert set(contents(tmp_path / "a").values()).isdisjoint(contents(tmp_path / "b").values())


def test_what_one_part_alone_reads_is_closed_to_others(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        assert carpool("make-secrets", str(tmp_path)).returncode == 0
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in contents(tmp_path)}
    assert modes["webhooks/secret"] == modes["flower/password"] == 0o600
    assert modes["redis/redis.conf"] == modes["redis/url"] == 0o644, "another user's container reads it"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("a file")
    done = carpool("make-secrets", str(tmp_path))
    assert done.returncode == ExitCode.PRECONDITION
    assert done.stderr.startswith(f"Error: {tmp_path}/redis/password cannot be written (")


def test_the_parts_work_with_what_was_made(tmp_path: Path) -> None:
    """A server with the configuration that Compose gives it, and a part that knows the file of the URL alone."""
    port = free_port()
    assert carpool("make-secrets", str(tmp_path), "--redis-host", f"127.0.0.1:{port}").returncode == 0
    configuration = tmp_path / "redis/redis.conf"
    configuration.write_text(configuration.read_text() + f"port {port}\n")
    settings = {"CARPOOL_REDIS_URL_FILE": str(tmp_path / "redis/url")}
    with RedisServer(tmp_path / "data") as other:  # only for its program
        program = Path(f"/proc/{other.pid}/exe").resolve()
        server = subprocess.Popen(
            [str(program), str(configuration), "--dir", str(tmp_path), "--appendonly", "yes", "--save", ""],
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: carpool("status", settings=settings).returncode == ExitCode.NOT_RUNNING, "Redis answers")
            done = carpool("health", "worker", settings=settings)
            assert done.returncode == ExitCode.FAILED, done.stderr
            assert "No heartbeat" in done.stderr
            wrong = carpool("health", "worker", settings={"CARPOOL_REDIS_URL": f"redis://127.0.0.1:{port}/0"})
            assert wrong.returncode == ExitCode.UNAVAILABLE
        finally:
            server.terminate()
            server.wait(20)


def test_the_webhooks_secret_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert carpool("make-secrets", str(tmp_path)).returncode == 0
    monkeypatch.setenv("CARPOOL_WEBHOOK_SECRET_FILE", str(tmp_path / "webhooks/secret"))
    (secret,) = webhook_secrets(load_settings())
    assert secret.startswith("whsec_")


# --- settings whose value stands in a file ----------------------------------------------------------------------------


def test_a_value_in_a_file_counts_and_an_option_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://:secret@host:1/0\n")
    (tmp_path / "key").write_text("cpk_x\n")
    monkeypatch.setenv("CARPOOL_REDIS_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("CARPOOL_API_KEY_FILE", str(tmp_path / "key"))
    settings = load_settings()
    assert settings.redis_url == "redis://:secret@host:1/0"
    assert settings.api_key.get_secret_value() == "cpk_x"
    assert "redis_url" in settings.model_fields_set, "no server of its own is started"
    rendered = settings.renders_as_environment
    assert rendered["CARPOOL_REDIS_URL"] == "redis://:secret@host:1/0"
    assert not {"CARPOOL_REDIS_URL_FILE", "CARPOOL_API_KEY_FILE", "CARPOOL_API_KEY"} & set(rendered)
    assert load_settings({"redis_url": "redis://other/0"}).redis_url == "redis://other/0"


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "it cannot be read (No such file or directory)"), (b" \n", "it is empty"), (b"\xff", "it is no text")],
)
def test_a_file_that_holds_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, named: str
) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("CARPOOL_REDIS_URL_FILE", str(path))
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert f"CARPOOL_REDIS_URL_FILE={path}: " in str(caught.value)
    assert named in str(caught.value)


def test_a_value_and_a_file_of_it_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_REDIS_URL", "redis://:hidden@host/0")
    monkeypatch.setenv("CARPOOL_REDIS_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(SettingsError, match="CARPOOL_REDIS_URL and CARPOOL_REDIS_URL_FILE are both set") as caught:
        load_settings()
    assert "hidden" not in str(caught.value)


# --- Flower ----------------------------------------------------------------------------------------------------------


def test_flower_alone_is_refused_without_a_password(tmp_path: Path) -> None:
    done = carpool("flower")
    assert done.returncode == ExitCode.PRECONDITION
    assert "CARPOOL_FLOWER_PASSWORD_FILE" in done.stderr


def test_flower_alone_asks_for_the_password_of_the_file(own_redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2hunter2\n")
    port = str(free_port())
    settings = {
        "CARPOOL_REDIS_URL": own_redis.url,
        "CARPOOL_FLOWER_PASSWORD_FILE": str(tmp_path / "password"),
        "FLOWER_PERSISTENT": "true",
        "FLOWER_DB": str(tmp_path / "flower"),
    }
    flower = subprocess.Popen([CARPOOL, "flower", "--port", port], env=plain_environment() | settings, cwd=tmp_path)
    try:
        until(lambda: carpool("health", "flower", "--port", port).returncode == 0, "it answers")
        assert httpx2.get(f"http://127.0.0.1:{port}/tasks").status_code == 401
        assert httpx2.get(f"http://127.0.0.1:{port}/tasks", auth=("carpool", "wrong")).status_code == 401
        assert httpx2.get(f"http://127.0.0.1:{port}/tasks", auth=("carpool", "hunter2hunter2")).status_code == 200
        assert "hunter2" not in Path(f"/proc/{flower.pid}/cmdline").read_text()
        flower.terminate()
        assert flower.wait(30) == 0
        assert list(tmp_path.glob("flower*")), "what it knows is kept"
    finally:
        flower.kill()
        flower.wait()
