"""The door of the API: who is let in, and that nothing stands open by accident."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis
from fastapi.routing import APIRoute
from openai import AuthenticationError, OpenAI
from starlette.routing import Mount, Route

from api.app import create_app
from api.keyring import LOOK_S
from api.safety import is_loopback
from api.server import check_host
from tasks import keys
from tasks.api_keys import KeyStore, digest_of
from tasks.settings import Settings, SettingsError
from tests.api_keys import Holder, make_key, revoke
from tests.api_server import ApiServer, events_of, running_api, until
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner
from tests.service import ROOT

#: All that everybody may read; a path that is added here is open on purpose.
OPEN = {("GET", "/health/live"), ("GET", "/health/accepting"), ("GET", "/health/ready")}
#: The page's own files, which are the same for everybody and know nothing.
OPEN |= {("GET", "/" if path.name == "index.html" else f"/page/{path.name}") for path in (ROOT / "api/page").iterdir()}
#: From the moment a key is revoked, and some time for a busy machine.
REVOKED_S = LOOK_S + 4


@pytest.fixture
def holder(redis_client: redis.Redis) -> Holder:
    return make_key(redis_client, "first")


@pytest.fixture
def api(settings: Settings, holder: Holder) -> Iterator[ApiServer]:
    with running_api(settings) as api:
        yield api


@pytest.fixture
def stranger(api: ApiServer) -> Iterator[httpx2.Client]:
    with api.client() as client:
        yield client


@pytest.fixture
def client(api: ApiServer, holder: Holder) -> Iterator[httpx2.Client]:
    with api.client(headers=holder.headers) as client:
        yield client


def assert_unauthorized(response: httpx2.Response) -> None:
    assert response.status_code == 401, f"{response.request.method} {response.request.url}: {response.text}"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert response.headers["www-authenticate"].startswith("Bearer ")


def _filled(path: str) -> str:
    return "/".join("x" if part.startswith("{") else part for part in path.split("/"))


def every_route(api: ApiServer) -> set[tuple[str, str]]:
    """Method and path of everything that the application answers, by its routes and by its description."""
    found: set[tuple[str, str]] = set()
    for route in api.app.routes:
        if isinstance(route, APIRoute | Route):
            found |= {(method, route.path) for method in route.methods or {"GET"}}
        elif isinstance(route, Mount):
            found.add(("GET", f"{route.path}/x"))
        else:
            # FastAPI's own kinds that hold further routes
            found |= {("GET", str(getattr(route, "path", "/x")))}
    for path, operations in api.app.openapi()["paths"].items():
        found |= {(method.upper(), path) for method in operations}
    return found


def test_without_a_key_nothing_answers_but_what_is_open_on_purpose(api: ApiServer, stranger: httpx2.Client) -> None:
    routes = every_route(api)
    assert len(routes) > 30
    assert {("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/jobs"), ("DELETE", "/v1/files/{id}")} <= routes
    for method, path in sorted(routes):
        response = stranger.request(method, _filled(path))
        if (method, path) in OPEN or (method == "HEAD" and ("GET", path) in OPEN):
            assert response.status_code in (200, 405, 503), path
        elif method == "HEAD":
            assert response.status_code == 401
        else:
            assert_unauthorized(response)


@pytest.mark.parametrize(
    "path",
    [
        "/page", "/page/", "/page/x.js", "/page/../jobs", "/page/main.js/", "/index.html",
        "/metrics", "/nowhere", "/health", "/health/", "/health/live/", "/health/../jobs", "//health/live",
        "/health/live/../../jobs", "/Health/live", "/health/live%00", "/docs/oauth2-redirect", "/redoc", "/static/x",
        "/jobs/", "/v1/embeddings", "/health/live;x", "/%68ealth/live/x",
    ],
)  # fmt: skip
def test_neither_does_what_only_looks_like_it_or_may_come_later(stranger: httpx2.Client, path: str) -> None:
    request = stranger.build_request("GET", stranger.base_url)
    request.url = httpx2.URL(f"{stranger.base_url}".rstrip("/") + path)
    assert_unauthorized(stranger.send(request))


def test_what_is_open_is_open_for_reading_alone(stranger: httpx2.Client) -> None:
    for _, path in OPEN:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert_unauthorized(stranger.request(method, path))


def test_a_path_that_is_open_is_so_under_a_proxy_s_prefix_too_and_no_other_is(
    settings: Settings, holder: Holder
) -> None:
    with running_api(settings.model_copy(update={"root_path": "/car/"})) as api, api.client() as stranger:
        for path in ("/car/health/live", "/health/live"):
            assert stranger.get(path).status_code == 200
        for path in ("/car/jobs", "/car", "/carhealth/live", "/car/car/health/live", "/car//health/live"):
            assert_unauthorized(stranger.get(path))
        assert stranger.get("/car/jobs", headers=holder.headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer none"},
        {"Authorization": "Basic {secret}"},
        {"Authorization": "{secret}"},
        {"Authorization": "Bearer {digest}"},
        {"Authorization": "Bearer {id}"},
        {"Authorization": "Bearer {secret}x"},
        {"Authorization": "Bearer {short}"},
        {"Authorization": "Bearer {upper}"},
        {"Authorization": "Bearer " + "x" * 10_000},
        {"Authorization": "Bearer nobody", "X-API-Key": "{secret}"},
        {"X-API-Key": "nobody"},
        {"Cookie": "api_key={secret}"},
    ],
)
def test_what_is_no_key_is_refused(stranger: httpx2.Client, holder: Holder, headers: dict[str, str]) -> None:
    values = {
        "secret": holder.secret,
        "digest": holder.key.digest,
        "id": holder.id,
        "short": holder.secret[:-1],
        "upper": holder.secret.upper(),
    }
    response = stranger.get("/jobs", headers={name: text.format(**values) for name, text in headers.items()})
    assert_unauthorized(response)
    assert holder.secret[4:] not in response.text


def test_a_key_in_the_address_is_none(stranger: httpx2.Client, holder: Holder) -> None:
    for query in ("api_key", "key", "token", "access_token"):
        assert_unauthorized(stranger.get(f"/jobs?{query}={holder.secret}"))


def test_bytes_that_are_no_text_are_no_key(api: ApiServer, stranger: httpx2.Client) -> None:
    assert_unauthorized(stranger.get("/jobs", headers=[(b"Authorization", b"Bearer \xff\xfe\xe9")]))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer {secret}"},
        {"authorization": "bearer   {secret}"},
        {"X-API-Key": "{secret}"},
        {"Authorization": "Basic Zm9vOmJhcg==", "X-API-Key": "{secret}"},
    ],
)
def test_a_key_is_taken_as_clients_send_it(stranger: httpx2.Client, holder: Holder, headers: dict[str, str]) -> None:
    sent = {name: text.format(secret=holder.secret) for name, text in headers.items()}
    assert stranger.get("/jobs", headers=sent).status_code == 200
    assert stranger.get("/docs", headers=sent).status_code == 200


def test_openai_s_client_sends_its_key_and_raises_what_it_should_without(api: ApiServer, holder: Holder) -> None:
    with OpenAI(base_url=f"{api.url}/v1", api_key=holder.secret, max_retries=0) as client:
        assert client.models.list().data == []
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


def test_a_body_is_not_read_before_its_key_was(api: ApiServer, stranger: httpx2.Client) -> None:
    response = stranger.post("/jobs", content=b"{", headers={"Content-Type": "text/plain"})
    assert_unauthorized(response)
    assert response.headers["connection"] == "close"


def test_the_health_of_a_server_with_keys_is_told_to_strangers_as_a_status_alone(
    settings: Settings, stranger: httpx2.Client, client: httpx2.Client
) -> None:
    with ScriptedOwner(settings, name="secret-name") as owner:
        owner.heartbeat("loading", phase="loading model", progress=0.623)
        for reader, told in ((stranger, False), (client, True)):
            response = reader.get("/health/ready")
            assert (response.status_code, response.json()["status"]) == (503, "waiting")
            assert ("secret-name" in response.text) is told
            assert ("62 %" in response.text) is told
        owner.heartbeat("ready")
        # what is known of workers may be a second old
        until(lambda: stranger.get("/health/ready").json() == {"status": "ready"})


# --- the first key, and the last -------------------------------------------------------------------------------------


def test_the_first_key_closes_an_api_that_runs_and_revoking_the_last_does_not_open_it(
    settings: Settings, redis_client: redis.Redis
) -> None:
    with running_api(settings) as api, api.client() as client:
        assert client.get("/jobs", headers={"Authorization": "Bearer none"}).status_code == 200
        job = client.post("/jobs", json={"prompt": "x"}).json()["id"]
        assert client.get("/jobs", headers={"Host": "evil.example"}).status_code == 403
        holder = make_key(redis_client)
        until(lambda: client.get("/jobs").status_code == 401, REVOKED_S)
        assert client.get("/health/live").status_code == 200
        assert client.get("/jobs", headers=holder.headers).status_code == 200
        # with a key any name of this server is as good as another
        assert client.get("/jobs", headers={**holder.headers, "Host": "car.example"}).status_code == 200
        # what was made without one belongs to nobody who has one, and goes on
        assert client.get(f"/jobs/{job}", headers=holder.headers).status_code == 404
        assert redis_client.hget(keys.record(job), "status") == "queued"
        revoke(redis_client, holder)
        until(lambda: client.get("/jobs", headers=holder.headers).status_code == 401, REVOKED_S)
        assert "revoked" in client.get("/jobs", headers=holder.headers).json()["error"]["message"]
        assert_unauthorized(client.get("/jobs"))
        KeyStore(redis_client).forget(holder.key)
        until(lambda: client.get("/jobs").status_code == 200, REVOKED_S)
        assert [one["id"] for one in client.get("/jobs").json()["data"]] == [job]


def test_a_revoked_key_is_good_for_nothing_within_two_seconds(
    client: httpx2.Client, holder: Holder, redis_client: redis.Redis
) -> None:
    assert client.get("/jobs").status_code == 200
    revoked_at = time.monotonic()
    revoke(redis_client, holder)
    until(lambda: client.get("/jobs").status_code == 401, REVOKED_S)
    assert time.monotonic() - revoked_at < 2.5


def test_the_stream_and_the_wait_of_a_revoked_key_end_and_its_job_goes_on(
    settings: Settings, api: ApiServer, client: httpx2.Client, holder: Holder, redis_client: redis.Redis
) -> None:
    with ScriptedOwner(settings) as owner, client.stream("POST", "/generate_stream", json={"prompt": "x"}) as response:
        ride = owner.claim()
        owner.write(ride, " a")
        events = events_of(response)
        assert next(events).id == "1"
        waited: list[httpx2.Response] = []

        def wait() -> None:
            with api.client(headers=holder.headers, timeout=30) as waiting:
                waited.append(waiting.get(f"/jobs/{ride.id}?wait=20"))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: redis_client.exists(keys.attached(ride.id)))
        revoked_at = time.monotonic()
        revoke(redis_client, holder)
        (last,) = list(events)
        thread.join(20)
        assert time.monotonic() - revoked_at < 2.5
        assert last.data is not None
        assert last.data["error"]["code"] == "invalid_api_key"
        assert waited[0].status_code == 401
        assert owner.look(ride) == ""
        owner.finish(ride)


def test_a_key_expires_by_itself_and_so_does_what_is_open_with_it(
    settings: Settings, api: ApiServer, redis_client: redis.Redis
) -> None:
    holder = make_key(redis_client, "short")
    KeyStore(redis_client).expire(holder.key, time.time() + 3)
    with ScriptedOwner(settings) as owner, api.client(headers=holder.headers) as client:
        until(lambda: client.get("/jobs").status_code == 200, REVOKED_S)
        with client.stream("POST", "/generate_stream", json={"prompt": "x"}) as response:
            ride = owner.claim()
            (last,) = [event for event in events_of(response) if event.data]
            assert last.data is not None
            assert "has expired" in last.data["error"]["message"]
        owner.finish(ride)
        assert "has expired" in client.get("/jobs").json()["error"]["message"]


# --- Redis is away ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "paused"])
def test_keys_that_cannot_be_read_let_nobody_in(own_redis: RedisServer, how: str) -> None:
    with own_redis.client() as redis_client:
        holder = make_key(redis_client)
    settings = Settings(redis_url=own_redis.url, engine="simulated", redis_timeout_s=0.3)
    with running_api(settings) as api, api.client() as client:
        assert client.get("/openapi.json", headers=holder.headers).status_code == 200
        own_redis.stop() if how == "stopped" else own_redis.pause()
        until(lambda: client.get("/openapi.json", headers=holder.headers).status_code == 503, 10)
        for headers in (holder.headers, {}, {"Authorization": "Bearer nobody"}):
            response = client.get("/openapi.json", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "redis_unavailable")
            assert "retry-after" in response.headers
        assert client.get("/health/live").status_code == 200
        health = client.get("/health/accepting")
        assert health.status_code == 503
        assert str(own_redis.port) not in health.text
        own_redis.start() if how == "stopped" else own_redis.resume()
        until(lambda: client.get("/openapi.json", headers=holder.headers).status_code == 200, 20)
        assert_unauthorized(client.get("/openapi.json"))


def test_an_api_that_starts_without_redis_lets_nobody_in(own_redis: RedisServer) -> None:
    with own_redis.client() as redis_client:
        holder = make_key(redis_client)
    own_redis.stop()
    with (
        running_api(Settings(redis_url=own_redis.url, engine="simulated", redis_timeout_s=0.3)) as api,
        api.client() as client,
    ):
        assert client.get("/openapi.json").status_code == 503
        own_redis.start()
        until(lambda: client.get("/openapi.json").status_code == 401, 20)
        assert client.get("/openapi.json", headers=holder.headers).status_code == 200


def test_a_key_costs_no_call_of_redis_per_request(
    client: httpx2.Client, redis_client: redis.Redis, holder: Holder
) -> None:
    def num_calls(command: str) -> int:
        stats: dict[str, Any] = redis_client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    client.get("/docs")
    before = {command: num_calls(command) for command in ("get", "hget", "hgetall")}
    started = time.monotonic()
    for _ in range(300):
        assert client.get("/docs").status_code == 200
    looks = (time.monotonic() - started) / LOOK_S + 2
    assert num_calls("get") - before["get"] <= looks * 3  # the keeper and the batches look too
    assert num_calls("hgetall") == before["hgetall"]


@pytest.mark.parametrize("record", ["", "no json", "[]", "{}", '{"id": 1}', '{"id": "key_x", "name": "x"}'])
def test_a_record_that_cannot_be_read_lets_nobody_in_and_keeps_nobody_out(
    settings: Settings, redis_client: redis.Redis, record: str
) -> None:
    secret = "x" * 43
    redis_client.hset(keys.API_KEYS, digest_of(secret), record)
    with running_api(settings) as api, api.client() as client:
        assert_unauthorized(client.get("/jobs"))
        assert_unauthorized(client.get("/jobs", headers={"Authorization": f"Bearer {secret}"}))
        holder = make_key(redis_client)
        until(lambda: client.get("/jobs", headers=holder.headers).status_code == 200)


# --- hosts -----------------------------------------------------------------------------------------------------------


def test_a_host_that_others_reach_is_served_once_there_is_a_key(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, host="0.0.0.0")
    with pytest.raises(SettingsError, match=r"CARPOOL_HOST=0\.0\.0\.0: there is no API key.*carpool keys create"):
        check_host(settings)
    make_key(redis_client)
    check_host(settings)


def test_where_others_are_served_a_key_is_needed_also_when_redis_has_forgotten_all(
    redis_url: str, redis_client: redis.Redis
) -> None:
    assert not is_loopback("0.0.0.0")
    holder = make_key(redis_client)
    with running_api(Settings(redis_url=redis_url, host="0.0.0.0", engine="simulated")) as api, api.client() as client:
        assert client.get("/jobs", headers=holder.headers).status_code == 200
        redis_client.flushall()
        until(lambda: client.get("/jobs", headers=holder.headers).status_code == 401, REVOKED_S)
        for host in ("127.0.0.1", "localhost", "car.example"):
            response = client.get("/jobs", headers={"Host": host})
            assert_unauthorized(response)
            assert "carpool keys create" in response.json()["error"]["message"]


def test_a_setting_that_allows_no_keys_means_nothing_once_there_are_some(
    redis_url: str, redis_client: redis.Redis
) -> None:
    with (
        running_api(Settings(redis_url=redis_url, engine="simulated", allow_no_keys=True)) as api,
        api.client() as client,
    ):
        assert client.get("/jobs", headers={"Host": "car.example"}).status_code == 200
        make_key(redis_client)
        until(lambda: client.get("/jobs").status_code == 401, REVOKED_S)


def test_a_page_of_an_allowed_origin_is_told_what_it_lacks(redis_url: str, redis_client: redis.Redis) -> None:
    make_key(redis_client)
    settings = Settings(redis_url=redis_url, engine="simulated", cors_origins="https://page.example")
    origin = {"Origin": "https://page.example"}
    with running_api(settings) as api, api.client() as client:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert client.options("/jobs", headers={**origin, **ask}).status_code == 200
        response = client.get("/jobs", headers=origin)
        assert_unauthorized(response)
        assert response.headers["access-control-allow-origin"] == "https://page.example"


# --- CARPOOL_API_KEYS_FILE -------------------------------------------------------------------------------------------

LONG = "0123456789abcdef" * 4


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_keys_of_a_file_are_there_from_the_start_and_go_with_their_line(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nweb {LONG} rpm=60 models=a,b\n\nbatch {LONG}b priority_ceiling=low expires=2020-01-01\n")
    with_file = settings.model_copy(update={"api_keys_file": str(file)})
    with running_api(with_file) as api, api.client() as client:
        assert client.get("/jobs", headers=bearer(LONG)).status_code == 200
        assert "has expired" in client.get("/jobs", headers=bearer(f"{LONG}b")).text
        found = {key.name: key for key in KeyStore(redis_client).table().values()}
        assert (found["web"].requests_per_minute, found["web"].models) == (60, ("a", "b"))
        assert found["batch"].priority_ceiling == 9
        assert LONG not in json.dumps(redis_client.hgetall(keys.API_KEYS))
        # Redis is emptied: the keys of the file come back by themselves
        redis_client.flushall()
        until(lambda: redis_client.hlen(keys.API_KEYS) == 2, 10)
        assert client.get("/jobs", headers=bearer(LONG)).status_code == 200
        assert_unauthorized(client.get("/jobs"))
    # another key under the same name is the same caller
    file.write_text(f"web {LONG}new\n")
    with running_api(with_file) as api, api.client() as client:
        assert client.get("/jobs", headers=bearer(f"{LONG}new")).status_code == 200
        assert "revoked" in client.get("/jobs", headers=bearer(LONG)).text
        table = KeyStore(redis_client).table()
        assert len({key.id for key in table.values() if key.name == "web"}) == 1
    file.write_text(f"web {LONG}\n")
    with running_api(with_file) as api, api.client() as client:
        assert client.get("/jobs", headers=bearer(LONG)).status_code == 200


def test_a_key_of_a_file_that_the_command_has_revoked_stays_so(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"web {LONG}\n")
    with_file = settings.model_copy(update={"api_keys_file": str(file)})
    for _ in range(2):
        with running_api(with_file) as api, api.client() as client:
            store = KeyStore(redis_client)
            until(store.table)
            (key,) = store.table().values()
            store.revoke(key, "command", time.time())
            until(lambda client=client: client.get("/jobs", headers=bearer(LONG)).status_code == 401)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it lists no key"),
        ("# web\n", "it lists no key"),
        (f"{LONG}\n", "line 1: it has one word"),
        ("web short\n", "line 1: its key has 5 characters"),
        (f"web {LONG} rpm=0\n", "line 1: rpm '0'"),
        (f"ok {LONG}\nweb {LONG}x speed=3\n", "line 2: a word behind the key is no term"),
        (f"web {LONG} {LONG}\n", "line 1: a word behind the key is no term"),
        (f"web {LONG} expires=30d\n", "write a date"),
        (f"a {LONG}\nb {LONG}\n", "a and b have the same key"),
        (f"{'n' * 65} {LONG}\n", "the name has 65 characters"),
        (f"cpk_{LONG} {LONG}\n", "no key's beginning"),
        (f"web {LONG} priority_ceiling=10\n", "high, normal, low, or a number from 0 to 9"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_by_line_and_without_showing_a_key(
    settings: Settings, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        create_app(settings.model_copy(update={"api_keys_file": str(file)}))
    assert says.lower() in str(caught.value).lower()
    assert str(file) in str(caught.value)
    assert LONG not in str(caught.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"CARPOOL_API_KEYS_FILE=.*nowhere: it cannot be read"):
        create_app(Settings(api_keys_file=str(tmp_path / "nowhere")))
