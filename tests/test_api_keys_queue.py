"""API keys before a queue with caps: whose places are whose, what is counted when, and what the headers speak of."""

from __future__ import annotations

from typing import Any

import httpx2
import redis

from tasks import keys
from tasks.settings import Settings
from tests.api_keys import Holder, make_key
from tests.api_server import running_api


def submit(client: httpx2.Client, holder: Holder, **fields: object) -> httpx2.Response:
    body = {"prompt": "Hello, I am", "max_tokens": 10, **fields}
    return client.post("/jobs", json=body, headers=holder.headers)


def cancel(client: httpx2.Client, holder: Holder, submitted: httpx2.Response) -> None:
    """Cancel a job that waits: it ends at once."""
    answer = client.post(f"/jobs/{submitted.json()['id']}/cancel", headers=holder.headers)
    assert answer.json()["status"] == "cancelled"


def code_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def limits_of(response: httpx2.Response, what: str) -> tuple[str | None, str | None]:
    found = response.headers
    return found.get(f"x-ratelimit-limit-{what}"), found.get(f"x-ratelimit-remaining-{what}")


def test_each_key_has_its_own_part_of_the_queue(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_queued_jobs=3, max_queued_jobs_per_key=2)
    one, other = make_key(redis_client, "one"), make_key(redis_client, "other")
    with running_api(settings) as api, api.client() as client:
        taken = [submit(client, one) for _ in range(2)]
        assert [answer.status_code for answer in taken] == [202, 202]
        assert code_of(submit(client, one)) == (429, "too_many_queued")
        first = submit(client, other)
        assert first.status_code == 202, "what one key has in the queue is not the other's"
        assert limits_of(first, "requests") == ("2", "1")
        assert code_of(submit(client, other)) == (503, "queue_full")
        cancel(client, one, taken[0])
        assert submit(client, other).status_code == 202
    load: Any = redis_client.hgetall(keys.load("simulated"))
    assert (load[f"jobs:{one.id}"], load[f"jobs:{other.id}"]) == ("1", "2")


def test_the_headers_are_those_of_the_key_s_limits_and_else_of_the_queue(
    redis_url: str, redis_client: redis.Redis
) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_queued_jobs=50, max_queued_tokens=1000)
    by_minute, free = make_key(redis_client, "minute", rpm="9"), make_key(redis_client, "free")
    with running_api(settings) as api, api.client() as client:
        answer = submit(client, by_minute)
        assert limits_of(answer, "requests") == ("9", "8")
        assert limits_of(answer, "tokens") == ("1000", "987"), "the key has no limit on tokens, the queue has"
        assert limits_of(submit(client, free), "requests") == ("50", "48")


def test_what_the_queue_refuses_costs_nothing_of_the_minute(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_queued_jobs=2)
    holder = make_key(redis_client, rpm="3", max_concurrent="5")
    with running_api(settings) as api, api.client() as client:
        taken = [submit(client, holder) for _ in range(2)]
        refused = [submit(client, holder) for _ in range(4)]
        assert {code_of(answer) for answer in refused} == {(503, "queue_full")}
        assert limits_of(refused[0], "requests") == ("2", "0"), "a refusal speaks of what refused"
        cancel(client, holder, taken[0])
        answer = submit(client, holder)
        assert (answer.status_code, limits_of(answer, "requests")) == (202, ("3", "0"))
        assert redis_client.zcard(keys.live(holder.id)) == 2
        cancel(client, holder, taken[1])
        beyond = submit(client, holder)
        assert code_of(beyond) == (429, "rate_limit_exceeded")
        assert limits_of(beyond, "requests") == ("3", "0")


def test_a_key_with_no_more_jobs_at_once_is_told_of_the_queue(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_queued_jobs=50)
    holder = make_key(redis_client, max_concurrent="1")
    with running_api(settings) as api, api.client() as client:
        assert submit(client, holder).status_code == 202
        refused = submit(client, holder)
        assert code_of(refused) == (429, "too_many_jobs")
        assert limits_of(refused, "requests") == ("50", "49")
    assert redis_client.zcard(keys.wait("simulated")) == 1


def test_tokens_a_minute_and_those_of_the_queue_are_the_same_count(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_queued_tokens=1000)
    holder = make_key(redis_client, tpm="500")
    with running_api(settings) as api, api.client() as client:
        answer = submit(client, holder)
        assert limits_of(answer, "tokens") == ("500", "487"), "11 bytes are 3 tokens"
        job = str(answer.json()["id"])
    assert redis_client.hget(keys.record(job), "counted") == "13"
    weight = str(redis_client.hget(keys.record(job), "weight"))
    assert weight.split(" ", maxsplit=1)[0] == "13"
    assert weight.endswith(holder.id)
