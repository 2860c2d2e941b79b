"""What the API says of itself, and of what it needs."""

from __future__ import annotations

import time

import httpx2

from tasks.settings import Settings
from tests.api_server import ApiServer, running_api
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner


def test_it_lives_and_accepts_before_any_worker_is_there(client: httpx2.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/accepting").json() == {"status": "accepting"}


def test_ready_names_what_it_waits_for_until_a_worker_rides(settings: Settings, client: httpx2.Client) -> None:
    response = client.get("/health/ready")
    assert response.status_code == 503
    assert "carpool worker" in response.json()["error"]["message"]
    with ScriptedOwner(settings) as owner:
        owner.heartbeat("loading", phase="loading model", progress=0.623)
        response = _fresh(client)
        assert response.status_code == 503
        assert response.json()["waiting_for"] == "worker-1 loading model 62 %"
        assert response.json()["error"]["code"] == "no_worker"
        owner.heartbeat("ready")
        state = {"model": "simulated", "state": "ready", "workers": 1, "slots": 4, "free": 4, "waiting": 0}
        assert _fresh(client, 200).json() == {"status": "ready", "models": [state]}


def _fresh(client: httpx2.Client, status: int = 503) -> httpx2.Response:
    """The answer once it has that status and is no longer the first one: it may be a second old."""
    first = client.get("/health/ready").text
    until = time.monotonic() + 10
    while time.monotonic() < until:
        response = client.get("/health/ready")
        if response.status_code == status and response.text != first:
            return response
        time.sleep(0.02)
    raise AssertionError(f"it still says: {first}")


def test_a_server_that_would_lose_jobs_is_refused_with_the_command_that_mends_it(own_redis: RedisServer) -> None:
    with own_redis.client() as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        with running_api(Settings(redis_url=own_redis.url, engine="simulated")) as api, api.client() as client:
            response = client.get("/health/accepting")
            assert response.status_code == 503
            assert "CONFIG SET maxmemory-policy noeviction" in response.json()["error"]["message"]
            redis.config_set("maxmemory-policy", "noeviction")
            assert client.get("/health/accepting").status_code == 200


def test_a_server_that_takes_no_writes_is_not_accepting(own_redis: RedisServer) -> None:
    with running_api(Settings(redis_url=own_redis.url, engine="simulated")) as api, api.client() as client:
        assert client.get("/health/accepting").status_code == 200
        with own_redis.client() as redis:
            redis.replicaof("127.0.0.1", "1")
            response = client.get("/health/accepting")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "redis_unavailable")


def test_the_documentation_shows_every_endpoint_and_our_own_shape_of_errors(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/basic_generate",
        "/generate",
        "/generate_stream",
        "/generate_vllm",
        "/service",
        "/jobs",
        "/jobs/{id}",
        "/jobs/{id}/cancel",
        "/jobs/{id}/stream",
        "/health/live",
        "/health/accepting",
        "/health/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/responses/{id}/cancel",
        "/v1/files",
        "/v1/files/{id}",
        "/v1/files/{id}/content",
        "/v1/batches",
        "/v1/batches/{id}",
        "/v1/batches/{id}/cancel",
    }
    assert "HTTPValidationError" not in document["components"]["schemas"]
    schema = document["paths"]["/jobs"]["post"]["responses"]["422"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
    assert client.get("/docs").status_code == 200


def test_a_job_is_as_the_documentation_says(settings: Settings, client: httpx2.Client) -> None:
    documented = set(client.get("/openapi.json").json()["components"]["schemas"]["JobView"]["properties"])
    with ScriptedOwner(settings) as owner:
        id = owner.run([" a"], client.post("/jobs", json={"prompt": "x"}).json()["id"])
    job = client.get(f"/jobs/{id}", params={"include": "events"}).json()
    assert set(job) | {"texts", "children", "durable"} == documented


def test_a_fault_of_our_own_is_an_error_like_the_others_and_names_the_request(
    api: ApiServer, client: httpx2.Client
) -> None:
    service = api.service
    api.call(setattr, api.app.state, "service", None)
    response = client.get("/jobs", headers={"x-request-id": "r-1"})
    api.call(setattr, api.app.state, "service", service)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"] == "r-1"
