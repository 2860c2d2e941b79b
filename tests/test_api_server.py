"""The API as a process: what it refuses to start with, and how it ends."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from api.server import check_redis, listen
from tasks.codes import CarpoolError
from tasks.settings import Settings, SettingsError
from tests.api_server import events_of
from tests.redis_server import RedisServer, free_port
from tests.scripted_owner import ScriptedOwner

SERVE = "from api.server import serve; from tasks.settings import load_settings; serve(load_settings())"
BOUND_S = 20.0


@contextmanager
def api_process(redis_url: str, **settings: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server in a process of its own, once it answers."""
    port = free_port()
    environment = {
        **os.environ,
        "CARPOOL_REDIS_URL": redis_url,
        "CARPOOL_PORT": str(port),
        "CARPOOL_ENGINE": "simulated",
        **settings,
    }
    process = subprocess.Popen([sys.executable, "-c", SERVE], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + BOUND_S
        with httpx2.Client(trust_env=False) as client:
            while True:
                try:
                    client.get(f"{url}/health/live")
                    break
                except httpx2.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.02)  # nothing tells that a port has opened
        yield process, url
    finally:
        process.kill()
        process.wait(BOUND_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_open_streams_at_once_and_they_go_on_at_a_replica(
    redis_url: str, number: signal.Signals
) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    with api_process(redis_url) as (process, url), ScriptedOwner(settings) as owner:
        with (
            httpx2.Client(base_url=url, timeout=BOUND_S, trust_env=False) as client,
            client.stream("POST", "/generate_stream", json={"prompt": "x"}) as response,
        ):
            ride = owner.claim()
            owner.write(ride, " a")
            events = events_of(response)
            assert next(events).id == "1"
            started = time.monotonic()
            process.send_signal(number)
            assert list(events) == []
        assert process.wait(BOUND_S) == 0
        assert time.monotonic() - started < 3
        assert owner.look(ride) == ""
        owner.write(ride, " b")
        owner.finish(ride)
    with (
        api_process(redis_url) as (_, url),
        httpx2.Client(base_url=url, timeout=BOUND_S, trust_env=False) as client,
        client.stream("GET", f"/jobs/{ride.id}/stream", headers={"Last-Event-ID": "1"}) as response,
    ):
        assert [event.id for event in events_of(response)] == ["2", "2.end"]


def test_it_ends_soon_also_while_a_client_takes_nothing(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    with (
        api_process(redis_url) as (process, url),
        ScriptedOwner(settings) as owner,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw,
    ):
        body = b'{"prompt":"x"}'
        raw.sendall(
            b"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        ride = owner.claim()
        for _ in range(100):
            owner.write(ride, "x" * 100_000)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(BOUND_S)
        assert time.monotonic() - started < 8
        assert owner.look(ride) == ""


def test_it_starts_without_redis_and_says_so(own_redis: RedisServer) -> None:
    own_redis.stop()
    with (
        api_process(own_redis.url, CARPOOL_REDIS_TIMEOUT_S="0.3") as (_, url),
        httpx2.Client(trust_env=False) as client,
    ):
        response = client.get(f"{url}/health/accepting")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "redis_unavailable")
        own_redis.start()
        until = time.monotonic() + BOUND_S
        while client.get(f"{url}/health/accepting").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_server_that_would_lose_jobs_is_refused_at_start(own_redis: RedisServer) -> None:
    with own_redis.client() as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(CarpoolError, match="maxmemory-policy allkeys-lru"):
            check_redis(Settings(redis_url=own_redis.url))
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("requirepass", "secret")
        with pytest.raises(CarpoolError, match="authenticate"):
            check_redis(Settings(redis_url=own_redis.url))
        check_redis(Settings(redis_url=own_redis.url.replace("redis://", "redis://:secret@")))


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with listen(Settings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"CARPOOL_PORT={port}: cannot listen there"):
            listen(Settings(port=port))


def test_answers_are_not_held_back_by_nagles_algorithm() -> None:
    with listen(Settings(port=0)) as listener:
        # asyncio turns it off for sockets that it knows to be TCP
        assert listener.proto == socket.IPPROTO_TCP


def test_it_takes_as_many_file_descriptors_as_it_may(redis_url: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with api_process(redis_url) as (process, _):
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 65536)


def test_it_serves_without_torch_and_without_the_worker(redis_url: str) -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['worker'] = None; "
    subprocess.run([sys.executable, "-c", program + "import api.app, api.server"], check=True, timeout=60)
