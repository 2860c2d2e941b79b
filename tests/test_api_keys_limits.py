"""What an API key may ask for over HTTP: how much in a minute, how much at once, which models, how urgently."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis

from tasks import keys
from tasks.registry import ModelInfo, register_model
from tasks.settings import Settings
from tests.api_keys import Holder, make_key, revoke
from tests.api_server import running_api, until
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner

LIMITS = [f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")]


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", model_aliases="nickname=other")


@contextlib.contextmanager
def calling(settings: Settings, holder: Holder) -> Iterator[httpx2.Client]:
    """An API that knows the key, and a client that sends it."""
    with running_api(settings) as api, api.client(headers=holder.headers) as client:
        yield client


def submit(client: httpx2.Client, **fields: Any) -> httpx2.Response:
    return client.post("/jobs", json={"prompt": "x" * 40, "max_tokens": 10, **fields})


def test_requests_a_minute_are_told_and_bounded(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    with calling(settings, make_key(redis_client, rpm="3")) as client:
        for left in (2, 1, 0):
            response = submit(client)
            assert response.status_code == 202
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
            assert response.headers["x-ratelimit-reset-requests"] in ("1m1s", "1m0s", "59s")
            assert "x-ratelimit-limit-tokens" not in response.headers
        response = submit(client)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests a minute" in error["message"]
        assert 50 <= int(response.headers["retry-after"]) <= 61
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-carpool-job-id" not in response.headers
        # what asks for nothing new is not counted, and not refused
        job = client.get("/jobs").json()["data"][0]["id"]
        for method, path in (("GET", f"/jobs/{job}"), ("POST", f"/jobs/{job}/cancel"), ("DELETE", f"/jobs/{job}")):
            assert client.request(method, path).status_code in (200, 204)
        assert redis_client.hlen(keys.minute(make_key(redis_client).id)) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/basic_generate", {"prompt": "x"}),
        ("/generate", {"prompts": ["x", "y"]}),
        ("/generate_stream", {"prompt": "x"}),
        ("/jobs", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": "x", "background": True}),
        ("/v1/batches", {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ],
)
def test_every_endpoint_that_makes_work_is_bounded(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis, path: str, body: dict[str, Any]
) -> None:
    holder = make_key(redis_client, rpm="1")
    with calling(settings, holder) as client:
        assert submit(client).status_code == 202
        response = client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in response.headers
    assert redis_client.zcard(keys.live(holder.id)) == 1


def test_an_upload_is_bounded_before_it_is_read(settings: Settings, redis_client: redis.Redis) -> None:
    upload: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    with calling(settings, make_key(redis_client, rpm="1")) as client:
        assert client.post("/v1/files", **upload).status_code == 200
        assert client.post("/v1/files", **upload).status_code == 429
        assert len(client.get("/v1/files").json()["data"]) == 1


def test_the_limits_hold_over_all_replicas_and_at_once(settings: Settings, redis_client: redis.Redis) -> None:
    holder = make_key(redis_client, rpm="20", max_concurrent="15")
    with (
        running_api(settings) as one,
        running_api(settings) as other,
        ThreadPoolExecutor(16) as threads,
        one.client(headers=holder.headers) as first,
        other.client(headers=holder.headers) as second,
    ):
        answers = list(threads.map(lambda i: submit(first if i % 2 else second), range(60)))
        assert Counter(answer.status_code for answer in answers) == {202: 15, 429: 45}
        assert redis_client.zcard(keys.live(holder.id)) == 15
        codes = Counter(answer.json()["error"]["code"] for answer in answers if answer.status_code == 429)
        assert codes == {"too_many_jobs": 45}
        for job in first.get("/jobs").json()["data"]:
            assert second.post(f"/jobs/{job['id']}/cancel").status_code == 200
        answers = list(threads.map(lambda i: submit(first if i % 2 else second), range(20)))
        # 20 a minute, 15 of them are used
        assert Counter(answer.status_code for answer in answers) == {202: 5, 429: 15}


def test_a_key_that_has_as_many_jobs_as_it_may_is_told_so_and_another_is_not(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    other = make_key(redis_client, "other")
    with calling(settings, make_key(redis_client, max_concurrent="2")) as client:
        first = submit(client).json()["id"]
        ride = owner.claim(first)
        assert submit(client).status_code == 202
        response = submit(client)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "too_many_jobs")
        assert "2 jobs at once: 2 have not ended" in error["message"]
        assert response.headers["retry-after"] == "10", "nobody can tell when one will have ended"
        assert submit(client).status_code == 429
        assert client.post("/jobs", json={"prompt": "x"}, headers=other.headers).status_code == 202
        owner.finish(ride)
        assert submit(client).status_code == 202
        never = client.post("/generate", json={"prompts": ["a", "b", "c"]})
        assert never.status_code == 429
        assert "Ask for fewer in one request" in never.json()["error"]["message"]


def test_an_idempotent_request_sent_again_is_answered_beyond_every_limit(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    with calling(settings, make_key(redis_client, rpm="1", tpm="100", max_concurrent="1")) as client:
        headers = {"Idempotency-Key": "order-17"}
        first = client.post("/jobs", json={"prompt": "x", "max_tokens": 5}, headers=headers)
        again = client.post("/jobs", json={"prompt": "x", "max_tokens": 5}, headers=headers)
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json()["id"] == again.json()["id"]


def test_tokens_a_minute_are_bounded_and_what_was_not_used_is_given_back(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    with calling(settings, make_key(redis_client, tpm="200")) as client:
        first = submit(client, max_tokens=150)
        left = int(first.headers["x-ratelimit-remaining-tokens"])
        assert first.headers["x-ratelimit-limit-tokens"] == "200"
        assert 30 <= left <= 42  # the prompt counts as 40 bytes / 4, and what is around it
        refused = submit(client, max_tokens=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "200 tokens a minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 50
        owner.run([" a", " b"], first.json()["id"])
        used_5 = submit(client, max_tokens=60)
        assert used_5.status_code == 202
        assert 200 - 5 - 60 - 20 <= int(used_5.headers["x-ratelimit-remaining-tokens"]) <= 200 - 5 - 60 - 10


def test_a_request_that_can_never_fit_says_so_and_is_not_tried_again(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    holder = make_key(redis_client, tpm="50")
    with running_api(settings) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key=holder.secret) as client:
        started = time.monotonic()
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="simulated", prompt="x", max_tokens=51)
        assert time.monotonic() - started < 5, "the client has tried again"
        assert "Lower max_tokens" in str(caught.value)
        assert "retry-after" in caught.value.response.headers


def test_a_request_that_leaves_max_tokens_to_us_fits_into_every_limit(
    settings: Settings, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    with calling(settings, make_key(redis_client, tpm="50")) as client:
        assert client.post("/jobs", json={"prompt": "x"}).status_code == 202
        assert client.post("/jobs", json={"prompt": "x"}).status_code == 429


def test_the_models_of_a_key_are_all_that_there_is_for_it(settings: Settings, redis_client: redis.Redis) -> None:
    everything = make_key(redis_client, "everything")
    with contextlib.ExitStack() as stack:
        for name in ("simulated", "other", "third"):
            served = settings.model_copy(update={"served_model_name": name})
            stack.enter_context(ScriptedOwner(served, name=f"worker-{name}")).heartbeat()
        client = stack.enter_context(calling(settings, make_key(redis_client, models="nickname, third")))
        assert {card["id"] for card in client.get("/v1/models").json()["data"]} == {"other", "nickname", "third"}
        for name in ("other", "nickname", "third"):
            assert client.get(f"/v1/models/{name}").status_code == 200
            assert submit(client, model=name).status_code == 202
        refused, unknown = submit(client, model="simulated"), submit(client, model="nobody")
        assert refused.status_code == unknown.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert refused.json()["error"]["param"] == "model"
        assert refused.text.replace("simulated", "nobody") == unknown.text
        assert "other, third" in refused.text
        assert client.get("/v1/models/simulated").status_code == 404
        chat = {"model": "simulated", "messages": [{"role": "user", "content": "x"}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 404
        assert {pool["model"] for pool in client.get("/health/ready").json()["models"]} == {"other", "third"}
        assert client.get("/health/ready", params={"model": "nickname"}).status_code == 200
        hidden = client.get("/health/ready", params={"model": "simulated"})
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "model_not_found")
        # one that names no model gets one that it may use
        assert submit(client).json()["model"] in ("other", "third")
        seen = client.get("/v1/models", headers=everything.headers).json()["data"]
        assert len(seen) == 4


def test_a_key_for_models_that_nobody_has_served_yet_gets_none(settings: Settings, redis_client: redis.Redis) -> None:
    with calling(settings, make_key(redis_client, models="later")) as client:
        for fields in ({}, {"model": "later"}, {"model": "simulated"}):
            response = submit(client, **fields)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert "this API key may use later, and no worker has ever" in submit(client).json()["error"]["message"]
        register_model(redis_client, ModelInfo("later", "later", "simulated", registered_at=time.time()))
        # what is known of models may be a second old
        until(lambda: submit(client).status_code == 202)
        assert submit(client).json()["model"] == "later"


@pytest.mark.parametrize(
    ("ceiling", "asked", "becomes"),
    [
        ("normal", None, 5),
        ("normal", "normal", 5),
        ("normal", "low", 9),
        ("normal", 5, 5),
        ("normal", "high", None),
        ("normal", 0, None),
        ("normal", 4, None),
        ("low", None, 9),
        ("low", "normal", None),
        ("7", None, 7),
        ("7", 8, 8),
        ("high", "high", 1),
        ("high", 0, None),
    ],
)
def test_a_priority_above_the_key_s_ceiling_is_refused_and_a_default_gives_way(
    settings: Settings, redis_client: redis.Redis, ceiling: str, asked: str | int | None, becomes: int | None
) -> None:
    with calling(settings, make_key(redis_client, priority_ceiling=ceiling)) as client:
        response = submit(client, **({} if asked is None else {"priority": asked}))
        if becomes is None:
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (403, "priority_not_allowed", "priority")
            assert repr(asked) in error["message"]
            assert client.get("/jobs").json()["data"] == []
        else:
            assert response.json()["priority"] == becomes


def test_a_key_without_limits_is_told_of_none(settings: Settings, redis_client: redis.Redis) -> None:
    holder = make_key(redis_client)
    with calling(settings, holder) as client:
        response = submit(client)
        told = {name: response.headers[name] for name in LIMITS if "-limit-" in name and name in response.headers}
        assert told == {"x-ratelimit-limit-requests": str(settings.max_queued_jobs)}, "of the queue alone"
        assert not redis_client.exists(keys.minute(holder.id))


def fill(client: redis.Redis) -> None:
    """Until the server takes no more."""
    with contextlib.suppress(redis.ResponseError):
        for i in range(1000):
            client.set(f"filler:{i}", "x" * 100_000)
    with pytest.raises(redis.ResponseError, match=r"OOM|used memory"):
        client.set("filler", "x" * 100_000)


def test_a_full_redis_still_revokes_keys(tmp_path: Path) -> None:
    with RedisServer(tmp_path, extra=("--maxmemory", "3mb")) as server, server.client() as client:
        holder = make_key(client)
        settings = Settings(redis_url=server.url, engine="simulated")
        with running_api(settings) as api, api.client(headers=holder.headers) as caller:
            assert caller.get("/jobs").status_code == 200
            fill(client)
            revoke(client, holder)
            until(lambda: caller.get("/jobs").status_code == 401)
