"""`GET /service`: who rides, who waits, which workers live, and what of it a key is told."""

from __future__ import annotations

import itertools
from typing import Any

import httpx2
import pytest
import redis

from api.onlook import FRESH_S
from api.scene import ServiceView
from tasks import keys
from tasks.onlook_calls import MAX_WAITING
from tasks.settings import Settings
from tests.api_keys import make_key
from tests.api_server import ApiServer, running_api, until
from tests.scripted_owner import ScriptedOwner


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", lease_s=6, renew_s=2)


def look(client: httpx2.Client, **options: Any) -> dict[str, Any]:
    """The first model; older than a moment ago is not good enough."""
    answer = client.get("/service", **options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    ServiceView.model_validate(body)
    assert len(body["models"]) <= 1
    return body["models"][0] if body["models"] else {}


def seen(client: httpx2.Client, holds: Any, **options: Any) -> dict[str, Any]:
    """The first look at the model that is as wanted."""
    found: list[dict[str, Any]] = []

    def is_so() -> bool:
        found[:] = [look(client, **options)]
        return bool(found[0] and holds(found[0]))

    until(is_so)
    return found[0]


def submit(client: httpx2.Client, **fields: Any) -> str:
    answer = client.post("/jobs", json={"prompt": "Hello, I am", "max_tokens": 9, **fields})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_nothing_is_seen_where_nothing_is(client: httpx2.Client) -> None:
    assert client.get("/service").json() == {"object": "service", "models": []}


def test_riders_sit_with_their_worker_and_the_others_wait(client: httpx2.Client, owner: ScriptedOwner) -> None:
    owner.heartbeat()
    first, second, third = (submit(client) for _ in range(3))
    ride = owner.write(owner.claim(first), " one", " two")
    model = seen(client, lambda model: model["workers"] and model["workers"][0]["riders"])
    (worker,) = model["workers"]
    assert (model["state"], worker["name"], worker["state"], worker["slots"]) == ("ready", "worker-1", "ready", 4)
    (rider,) = worker["riders"]
    assert (rider["id"], rider["tokens"], rider["max_tokens"]) == (first, 2, 9)
    assert (rider["stalled"], rider["stopping"]) == (False, False)
    assert (model["queue"], model["waiting"], model["stranded"]) == ([second, third], 2, [])
    assert client.post(f"/jobs/{first}/cancel", json={}).status_code == 202
    model = seen(client, lambda model: model["workers"][0]["riders"][0]["stopping"])
    owner.finish(ride, "cancelled", "cancelled")
    seen(client, lambda model: not model["workers"][0]["riders"])


def test_neither_hosts_nor_processes_are_told(client: httpx2.Client, owner: ScriptedOwner) -> None:
    owner.heartbeat()
    model = seen(client, lambda model: model["workers"])
    assert set(model["workers"][0]).isdisjoint({"host", "pid", "child_pid", "incarnation"})
    assert owner.incarnation not in client.get("/service").text


def test_a_rider_keeps_its_tag_and_others_have_others(client: httpx2.Client, owner: ScriptedOwner) -> None:
    owner.heartbeat()
    rides = [owner.claim(submit(client)) for _ in range(2)]
    model = seen(client, lambda model: len(model["workers"][0]["riders"]) == 2)
    tags = {rider["id"]: rider["tag"] for rider in model["workers"][0]["riders"]}
    assert len(set(tags.values())) == 2
    for ride in rides:
        owner.write(ride, " a")
    model = seen(client, lambda model: all(rider["tokens"] for rider in model["workers"][0]["riders"]))
    assert {rider["id"]: rider["tag"] for rider in model["workers"][0]["riders"]} == tags


def test_a_worker_that_is_not_heard_is_silent_and_its_riders_are_stranded_when_it_is_gone(
    client: httpx2.Client, owner: ScriptedOwner, redis_client: redis.Redis, settings: Settings
) -> None:
    owner.heartbeat()
    id = submit(client)
    owner.claim(id)
    members = keys.pool_workers(settings.pool)
    seen(client, lambda model: model["workers"][0]["state"] == "ready" and model["workers"][0]["riders"])
    # as if its last heartbeat were two and a half intervals old
    seconds, micros = redis_client.time()
    left_ms = round((5 - 2.5) * settings.heartbeat_s * 1000)
    redis_client.zadd(members, {owner.incarnation: seconds * 1000 + micros // 1000 + left_ms})
    seen(client, lambda model: model["workers"] and model["workers"][0]["state"] == "silent")
    redis_client.zrem(members, owner.incarnation)
    redis_client.delete(keys.worker(owner.incarnation))
    model = seen(client, lambda model: not model["workers"])
    assert [rider["id"] for rider in model["stranded"]] == [id]
    # nobody renews its lease
    seen(client, lambda model: model["stranded"] and model["stranded"][0]["stalled"])


def test_a_key_is_told_its_own_ids_alone(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    one, other = make_key(redis_client, "one"), make_key(redis_client, "other")
    owner.heartbeat()
    until(lambda: client.get("/service").status_code == 401)
    with api.client(headers=one.headers) as mine, api.client(headers=other.headers) as theirs:
        until(lambda: theirs.get("/service").status_code == 200)
        rides, waits = submit(mine), submit(theirs)
        owner.claim(rides)
        model = seen(mine, lambda model: model["workers"][0]["riders"] and model["waiting"] == 1)
        assert (model["workers"][0]["riders"][0]["id"], model["queue"]) == (rides, [None])
        model = look(theirs)
        assert (model["workers"][0]["riders"][0]["id"], model["queue"]) == (None, [waits])
        assert rides not in theirs.get("/service").text


def test_a_key_sees_its_own_models_alone(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    narrow = make_key(redis_client, "narrow", models="another")
    owner.heartbeat()
    until(lambda: client.get("/service").status_code == 401)
    with api.client(headers=narrow.headers) as holder:
        assert holder.get("/service").json()["models"] == []


def test_however_many_look_on_redis_is_asked_at_most_twice_a_second(
    client: httpx2.Client, owner: ScriptedOwner, redis_client: redis.Redis, api: ApiServer
) -> None:
    owner.heartbeat()
    asked: list[float] = []
    loop = api.loop
    onlook = api.service.onlook
    original = onlook._look

    async def counted() -> Any:
        asked.append(loop.time())
        return await original()

    onlook._look = counted  # type: ignore[method-assign]
    for _ in range(60):
        look(client)
    seen(client, lambda _: len(asked) >= 3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert min(gaps) >= FRESH_S - 0.02


def test_a_long_queue_is_told_by_its_beginning_and_its_length(client: httpx2.Client, owner: ScriptedOwner) -> None:
    owner.heartbeat()
    ids = [submit(client) for _ in range(MAX_WAITING + 3)]
    model = seen(client, lambda model: model["waiting"] == len(ids))
    assert model["queue"] == ids[:MAX_WAITING]


def test_without_redis_it_says_so() -> None:
    settings = Settings(redis_url="redis://127.0.0.1:1/0", engine="simulated", redis_timeout_s=0.5)
    with running_api(settings) as api, api.client() as client:
        answer = client.get("/service")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_unavailable")
