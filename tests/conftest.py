"""Fixtures that all tests share: a real Redis-compatible server, and an environment without a developer's settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
import redis

from tasks.settings import Settings
from tests.api_server import ApiServer, running_api
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner
from tests.service import Service

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The session's server; don't stop or pause it (`own_redis` is for that)."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the session's server, emptied for this test."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the emptied server that returns str."""
    with redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=5) as client:
        yield client


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for this test alone, which may kill, pause and start it again."""
    with RedisServer(tmp_path / "own-redis") as server:
        yield server


@pytest.fixture
def settings(redis_url: str) -> Settings:
    """What `api` and `owner` run with. A file that needs others has a fixture of this name of its own."""
    return Settings(redis_url=redis_url, engine="simulated")


@pytest.fixture
def api(settings: Settings) -> Iterator[ApiServer]:
    """An API without a worker."""
    with running_api(settings) as api:
        yield api


@pytest.fixture
def client(api: ApiServer) -> Iterator[httpx2.Client]:
    """A client of `api`."""
    with api.client() as client:
        yield client


@pytest.fixture
def owner(settings: Settings) -> Iterator[ScriptedOwner]:
    """A worker that does what the test says."""
    with ScriptedOwner(settings) as owner:
        yield owner


@pytest.fixture(scope="session", autouse=True)
def _signals_reach_what_we_start() -> Iterator[None]:
    """Under nohup, or in a script's background, we ignore signals that what we start shall not ignore."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        # what is ignored stays ignored in a new program, what is handled does not
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _settings_of_the_developer_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def simulated_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API with a server and a simulated worker of its own, for tests that break nothing of it."""
    folder = tmp_path_factory.mktemp("simulated")
    with (
        RedisServer(folder / "redis") as server,
        Service(server.url, folder, model_aliases="gpt-4o-mini=simulated, ghost=nobody") as service,
    ):
        service.worker()
        with running_api(service.settings) as api:
            yield api


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless browser for a module without async tests (`tests/browser.py`)."""
    from tests.browser import running_chromium  # what needs no browser does not load its client

    with running_chromium() as browser:
        yield browser
