"""Jobs over HTTP: submit, ask, wait, list, cancel, delete, and the same request twice."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import redis

from tasks import keys
from tasks.job_request import MAX_DRAWN_SEED, child_seed
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", max_wait_s=10)


def submit(client: httpx2.Client, **fields: object) -> dict[str, object]:
    response = client.post("/jobs", json={"prompt": "Hello", **fields})
    assert response.status_code == 202
    found: dict[str, object] = response.json()
    return found


def test_a_submitted_job_is_answered_with_its_object_and_where_it_is(client: httpx2.Client) -> None:
    response = client.post("/jobs", json={"prompt": "Hello", "metadata": {"a": ["ü", 1]}, "user": "me"})
    job = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert response.headers["x-carpool-job-id"] == job["id"]
    assert uuid.UUID(job["id"])
    assert job["status"] == "queued"
    assert job["queue_position"] == 1
    assert job["metadata"] == {"a": ["ü", 1]}
    assert 0 <= job["seed"] <= MAX_DRAWN_SEED
    assert "durable" not in job
    assert client.get(response.headers["location"]).json() == job


def test_a_job_is_recorded_with_its_defaults_and_all_it_asks_for(
    client: httpx2.Client, redis_client: redis.Redis
) -> None:
    plain = redis_client.hgetall(keys.record(str(submit(client)["id"])))
    assert json.loads(plain["params"])["max_tokens"] == 256
    assert json.loads(plain["params"])["temperature"] == 1
    assert plain["default_tokens"] == "1"
    asked = submit(
        client, max_tokens=7, temperature=0.5, stop="x", seed=11, logit_bias={"5": -3}, user="u", deadline_s=60
    )
    full = redis_client.hgetall(keys.record(str(asked["id"])))
    params = json.loads(full["params"])
    assert (params["max_tokens"], params["temperature"], params["stop"]) == (7, 0.5, ["x"])
    assert params["logit_bias"] == {"5": -3.0}
    assert "seed" not in params
    assert (full["seed"], full["default_tokens"], full["user"]) == ("11", "", "u")
    assert 59_000 < int(full["deadline"]) - int(full["created_at"]) <= 60_000


def test_a_chat_is_recorded_as_its_messages(client: httpx2.Client, redis_client: redis.Redis) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ho"}]
    response = client.post("/jobs", json={"messages": messages})
    assert response.status_code == 202
    given = json.loads(str(redis_client.hget(keys.record(response.json()["id"]), "input")))
    assert given == {"messages": [["user", "Hi you"], ["assistant", "ho"]]}


def test_a_finished_job_tells_its_text_and_usage(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = owner.run([" a", " ü"], str(submit(client)["id"]))
    job = client.get(f"/jobs/{id}").json()
    assert job["status"] == "succeeded"
    assert job["text"] == " a ü"
    assert job["finish_reason"] == "length"
    assert job["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert job["attempts"] == 1
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]


def test_a_long_poll_answers_when_the_job_ends(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = str(submit(client)["id"])
    ride = owner.claim(id)
    with ThreadPoolExecutor(1) as threads:
        poll = threads.submit(lambda: client.get(f"/jobs/{id}?wait=10").json())
        until(lambda: owner.client.exists(keys.attached(id)) == 1)
        started = time.monotonic()
        owner.finish(ride)
        assert poll.result(10)["status"] == "succeeded"
        assert time.monotonic() - started < 1
    until(lambda: owner.client.exists(keys.attached(id)) == 0)


def test_a_long_poll_answers_with_what_is_when_its_time_is_over(client: httpx2.Client) -> None:
    id = str(submit(client)["id"])
    started = time.monotonic()
    assert client.get(f"/jobs/{id}?wait=0.3").json()["status"] == "queued"
    assert 0.3 <= time.monotonic() - started < 2


@pytest.mark.parametrize("wait", ["11", "-1", "x", "nan", "inf"])
def test_a_wait_that_is_too_long_or_none_is_refused(client: httpx2.Client, wait: str) -> None:
    id = str(submit(client)["id"])
    response = client.get(f"/jobs/{id}?wait={wait}")
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "wait"


def test_a_hundred_long_polls_hold_no_connections(client: httpx2.Client, api: ApiServer, owner: ScriptedOwner) -> None:
    id = str(submit(client)["id"])
    limits = httpx2.Limits(max_connections=200)
    with api.client(limits=limits) as many, ThreadPoolExecutor(100) as threads:
        polls = [threads.submit(lambda: many.get(f"/jobs/{id}?wait=10").json()) for _ in range(100)]
        until(lambda: owner.client.zcard(keys.attached(id)) == 100)
        assert int(owner.client.info("clients")["connected_clients"]) < 80
        owner.run([" a"], id)
        assert {poll.result(10)["status"] for poll in polls} == {"succeeded"}


def test_jobs_are_listed_newest_first_in_pages(client: httpx2.Client) -> None:
    ids = [submit(client)["id"] for _ in range(5)]
    first = client.get("/jobs?limit=2").json()
    assert first["object"] == "list"
    second = client.get("/jobs", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    third = client.get("/jobs", params={"limit": 2, "cursor": second["next_cursor"]}).json()
    assert [job["id"] for page in (first, second, third) for job in page["data"]] == ids[::-1]
    assert third["next_cursor"] is None


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "cursor=x", "limit=x"])
def test_a_page_that_is_not_possible_is_refused(client: httpx2.Client, query: str) -> None:
    response = client.get(f"/jobs?{query}")
    assert response.status_code == 422
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_a_queued_job_is_cancelled_at_once(client: httpx2.Client) -> None:
    id = submit(client)["id"]
    response = client.post(f"/jobs/{id}/cancel")
    assert response.status_code == 200
    assert response.json()["status"] == "cancelled"
    assert client.post(f"/jobs/{id}/cancel").json()["status"] == "cancelled"


def test_a_riding_job_is_told_to_stop_and_keeps_its_partial_text(client: httpx2.Client, owner: ScriptedOwner) -> None:
    ride = owner.claim(str(submit(client)["id"]))
    owner.write(ride, " a")
    response = client.post(f"/jobs/{ride.id}/cancel")
    assert response.status_code == 202
    assert response.json()["cancel_requested"] is True
    assert owner.look(ride) == "cancelled"
    owner.finish(ride, "cancelled", "cancelled")
    job = client.get(f"/jobs/{ride.id}").json()
    assert (job["status"], job["text"], job["error"]["code"]) == ("cancelled", " a", "cancelled")


def test_an_ended_job_is_deleted_with_every_key_it_had(client: httpx2.Client, owner: ScriptedOwner) -> None:
    headers = {"Idempotency-Key": "k"}
    id = client.post("/jobs", json={"prompt": "x"}, headers=headers).json()["id"]
    owner.run([" a"], id)
    assert client.delete(f"/jobs/{id}").status_code == 204
    assert client.get(f"/jobs/{id}").status_code == 404
    assert client.delete(f"/jobs/{id}").status_code == 404
    assert [key for key in owner.client.scan_iter() if id in str(key) or "idem" in str(key)] == []
    assert client.get("/jobs").json()["data"] == []
    assert client.post("/jobs", json={"prompt": "y"}, headers=headers).json()["id"] != id


def test_a_group_is_deleted_as_a_whole_and_its_children_are_not(client: httpx2.Client, owner: ScriptedOwner) -> None:
    with ThreadPoolExecutor(1) as threads:
        post = threads.submit(lambda: client.post("/generate", json={"prompts": ["a", "b"]}))
        for _ in range(2):
            owner.run([" x"])
        id = post.result(10).headers["x-carpool-job-id"]
    refused = client.delete(f"/jobs/{id}.0")
    assert refused.status_code == 422
    assert f"DELETE /jobs/{id}" in refused.json()["error"]["message"]
    assert client.delete(f"/jobs/{id}").status_code == 204
    assert [key for key in owner.client.scan_iter() if id in str(key)] == []


@pytest.mark.parametrize("riding", [False, True])
def test_a_job_that_has_not_ended_is_not_deleted(client: httpx2.Client, owner: ScriptedOwner, riding: bool) -> None:
    id = str(submit(client)["id"])
    if riding:
        owner.claim(id)
    response = client.delete(f"/jobs/{id}")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "job_not_ended"
    assert client.get(f"/jobs/{id}").status_code == 200


@pytest.mark.parametrize("path", ["", "/stream", "/cancel"])
@pytest.mark.parametrize("id", ["0b0b0b0b-0000-4000-8000-000000000000", "a b", "x" * 129, "*", "{carpool}:j:x"])
def test_a_job_that_is_not_there_is_404(client: httpx2.Client, id: str, path: str) -> None:
    response = client.request("POST" if path == "/cancel" else "GET", f"/jobs/{id}{path}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "job_not_found"


def test_the_same_key_and_body_are_the_same_job(client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post(
        "/jobs", content=b'{"prompt": "x", "top_k": 5}', headers={**headers, "Content-Type": "application/json"}
    )
    again = client.post("/jobs", json={"top_k": 5, "prompt": "x"}, headers=headers)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert len(client.get("/jobs").json()["data"]) == 1


def test_the_same_key_with_another_body_is_a_conflict(client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    id = client.post("/jobs", json={"prompt": "x"}, headers=headers).json()["id"]
    response = client.post("/jobs", json={"prompt": "y"}, headers=headers)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "idempotency_conflict"
    assert id in response.json()["error"]["message"]


def test_a_key_counts_for_its_own_endpoint(client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    client.post("/jobs", json={"prompt": "x"}, headers=headers)
    with client.stream("POST", "/generate_stream", json={"prompt": "other"}, headers=headers) as response:
        assert response.status_code == 200


@pytest.mark.parametrize("key", [b"", b"x" * 256, "ümlaut".encode()])
def test_a_key_that_is_none_is_refused(client: httpx2.Client, key: bytes) -> None:
    response = client.post("/jobs", json={"prompt": "x"}, headers={b"Idempotency-Key": key})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_fifty_requests_with_one_key_at_once_make_one_job(api: ApiServer) -> None:
    with api.client() as client, ThreadPoolExecutor(20) as threads:
        answers = list(
            threads.map(
                lambda _: client.post("/jobs", json={"prompt": "x"}, headers={"Idempotency-Key": "k"}).json()["id"],
                range(50),
            )
        )
    assert len(set(answers)) == 1


def test_children_have_their_own_seeds_made_from_the_one_that_was_given(
    client: httpx2.Client, owner: ScriptedOwner
) -> None:
    post = threading.Thread(target=lambda: client.post("/generate", json={"prompts": ["a", "b"], "seed": 5}))
    post.start()
    id = owner.next_job().rpartition(".")[0]
    assert [client.get(f"/jobs/{id}.{index}").json()["seed"] for index in range(2)] == [
        child_seed(5, 0),
        child_seed(5, 1),
    ]
    assert client.get(f"/jobs/{id}").json()["seed"] == 5
    client.post(f"/jobs/{id}/cancel")
    post.join()


def test_with_fsync_asked_for_the_answer_says_that_the_job_is_on_disk(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url, engine="simulated", ack_after_fsync=True)
    with running_api(settings) as api, api.client() as client:
        assert submit(client)["durable"] is True
        own_redis.kill()
        own_redis.start()
        until(lambda: client.get("/health/accepting").status_code == 200)
        assert len(client.get("/jobs").json()["data"]) == 1


def test_a_server_without_an_append_only_file_is_not_durable_and_says_so(
    redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.config_set("appendonly", "no")
    try:
        settings = Settings(redis_url=redis_url, engine="simulated", ack_after_fsync=True)
        with running_api(settings) as api, api.client() as client:
            assert submit(client)["durable"] is False
            headers = {"Idempotency-Key": "k"}
            first = client.post("/jobs", json={"prompt": "x"}, headers=headers).json()
            assert client.post("/jobs", json={"prompt": "x"}, headers=headers).json()["id"] == first["id"]
    finally:
        redis_client.config_set("appendonly", "yes")


def test_a_full_redis_refuses_new_jobs_and_lets_those_that_ride_end(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url, engine="simulated")
    with running_api(settings) as api, api.client() as client, ScriptedOwner(settings) as owner:
        id = submit(client)["id"]
        ride = owner.claim(str(id))
        owner.client.config_set("maxmemory", "1")
        response = client.post("/jobs", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "redis_full"
        assert "retry-after" in response.headers
        assert client.get("/health/accepting").json()["error"]["code"] == "redis_full"
        owner.write(ride, " a")
        owner.finish(ride)
        assert client.get(f"/jobs/{id}").json()["text"] == " a"
        owner.client.config_set("maxmemory", "0")
        assert client.get("/health/accepting").status_code == 200


def test_without_redis_every_call_says_so_and_all_work_when_it_is_back(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url, engine="simulated", redis_timeout_s=0.3)
    with running_api(settings) as api, api.client() as client:
        id = submit(client)["id"]
        own_redis.stop()
        for method, path in (
            ("GET", f"/jobs/{id}"),
            ("GET", "/jobs"),
            ("GET", f"/jobs/{id}/stream"),
            ("GET", "/health/accepting"),
        ):
            response = client.request(method, path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "redis_unavailable")
            assert "retry-after" in response.headers
        for path in ("/jobs", "/basic_generate", "/generate_stream"):
            response = client.post(path, json={"prompt": "x"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "redis_unavailable")
        assert client.get("/health/live").status_code == 200
        own_redis.start()
        until(lambda: client.get("/health/accepting").status_code == 200)
        assert client.get(f"/jobs/{id}").status_code == 200
        submit(client)


def test_urls_stand_under_the_path_of_the_proxy(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", root_path="/llm/")
    with running_api(settings) as api, api.client() as client:
        for prefix in ("", "/llm"):
            response = client.post(f"{prefix}/jobs", json={"prompt": "x"})
            id = response.json()["id"]
            assert response.headers["location"] == f"/llm/jobs/{id}"
            job = client.get(f"/llm/jobs/{id}").json()
            assert job["urls"]["stream"] == f"/llm/jobs/{id}/stream"
        assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
