"""Event streams: what they say, how they are taken up again, and that they say what is true while nothing comes."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid

import httpx2
import pytest
import redis

from tasks import keys
from tasks.entries import TokenLogprob
from tasks.settings import Settings
from tests.api_server import ApiServer, Event, events_of, running_api, tokens_of, until
from tests.redis_server import RedisServer
from tests.scripted_owner import ScriptedOwner


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", sse_heartbeat_s=0.3)


def submit(client: httpx2.Client, **fields: object) -> str:
    response = client.post("/jobs", json={"prompt": "Hello", **fields})
    assert response.status_code == 202
    return str(response.json()["id"])


def replay(client: httpx2.Client, id: str, cursor: str = "") -> list[Event]:
    headers = {"Last-Event-ID": cursor} if cursor else {}
    with client.stream("GET", f"/jobs/{id}/stream", headers=headers) as response:
        assert response.status_code == 200
        return tokens_of(response)


def test_each_token_is_an_event_and_the_end_tells_how_it_ended(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = submit(client)
    ride = owner.claim(id)
    owner.write(ride, " a", " b")
    owner.finish(ride, tail=" c")
    events = replay(client, id)
    assert [event.id for event in events] == ["1", "2", "2.end"]
    assert events[0].data == {"token": " a", "sequence_id": id, "n": 1}
    assert events[2].data == {
        "token": " c",
        "sequence_id": id,
        "n": 2,
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "status": "succeeded",
        "error": None,
    }


def test_streams_are_not_cached_and_not_buffered_by_proxies(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = submit(client)
    owner.run([" a"], id)
    with client.stream("GET", f"/jobs/{id}/stream") as response:
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["content-type"].startswith("text/event-stream")
        tokens_of(response)


def test_tokens_come_while_they_are_made(client: httpx2.Client, owner: ScriptedOwner) -> None:
    with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response:
        id = response.headers["x-carpool-job-id"]
        assert response.headers["location"] == f"/jobs/{id}"
        events = (event for event in events_of(response) if event.data is not None)
        ride = owner.claim(id)
        for token in (" a", " b"):
            owner.write(ride, token)
            event = next(events)
            assert event.data is not None
            assert event.data["token"] == token
        owner.finish(ride)
        last = next(events)
        assert last.data is not None
        assert last.data["finish_reason"] == "length"
        assert last.data["usage"]["completion_tokens"] == 2


def test_leading_spaces_newlines_and_line_separators_come_through_unchanged(
    client: httpx2.Client, owner: ScriptedOwner
) -> None:
    texts = ["  lead", "\n", "\r\n\r", "\u2028", "\u2029\x85", "🚗汽", "data: x\n\n", "\x00\x1b"]
    id = submit(client)
    owner.run(texts, id)
    assert [event.data["token"] for event in replay(client, id)[:-1] if event.data] == texts


@pytest.mark.parametrize("after_the_end", [True, False])
def test_twenty_random_cuts_leave_no_gap_and_no_repeat(
    client: httpx2.Client, owner: ScriptedOwner, after_the_end: bool
) -> None:
    tokens = [f" {number}" for number in range(300)]
    id = submit(client)
    work = threading.Thread(target=owner.run, args=(tokens, id))
    work.start()
    if after_the_end:
        work.join()
    draw = random.Random(7)
    got: list[str] = []
    cursor = ""
    for _ in range(20):
        patience = draw.randrange(1, 15)
        with client.stream("GET", f"/jobs/{id}/stream", headers={"Last-Event-ID": cursor}) as response:
            for event in events_of(response):
                if event.data is None or cursor.endswith(".end"):
                    continue
                got.append(event.data["token"])
                cursor = event.id
                patience -= 1
                if not patience:
                    break
    work.join()
    got += [event.data["token"] for event in replay(client, id, cursor) if event.data]
    assert "".join(got) == "".join(tokens)
    assert got[:-1] == tokens


def test_the_cursor_may_stand_in_the_url_and_the_header_wins(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = submit(client)
    owner.run([" a", " b", " c"], id)
    with client.stream("GET", f"/jobs/{id}/stream?starting_after=2") as response:
        assert [event.id for event in tokens_of(response)] == ["3", "3.end"]
    with client.stream("GET", f"/jobs/{id}/stream?starting_after=2", headers={"Last-Event-ID": "3"}) as response:
        assert [event.id for event in tokens_of(response)] == ["3.end"]


def test_a_cursor_at_the_last_token_replays_the_end_and_one_behind_the_end_gets_204(
    client: httpx2.Client, owner: ScriptedOwner
) -> None:
    id = submit(client)
    owner.run([" a"], id)
    assert [event.id for event in replay(client, id, "1")] == ["1.end"]
    assert client.get(f"/jobs/{id}/stream", headers={"Last-Event-ID": "1.end"}).status_code == 204


@pytest.mark.parametrize("cursor", ["x", "-1", "1,2", "1.ende", "12345678901", "٣"])
def test_a_cursor_that_is_none_is_refused_with_its_value(client: httpx2.Client, cursor: str) -> None:
    id = submit(client)
    response = client.get(f"/jobs/{id}/stream", params={"starting_after": cursor})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "bad_cursor"
    assert cursor in response.json()["error"]["message"]


def test_a_stream_of_no_job_is_404(client: httpx2.Client) -> None:
    for id in (str(uuid.uuid4()), "%20", "a" * 200, "..%2f"):
        response = client.get(f"/jobs/{id}/stream")
        assert response.status_code == 404
        assert response.json()["error"]["code"] in ("job_not_found", "not_found")


def test_a_job_that_ended_before_its_first_token_has_a_stream(client: httpx2.Client) -> None:
    id = submit(client)
    assert client.post(f"/jobs/{id}/cancel").status_code == 200
    events = replay(client, id)
    assert [event.id for event in events] == ["0.end"]
    assert events[0].data is not None
    assert events[0].data["status"] == "cancelled"
    assert events[0].data["error"]["code"] == "cancelled"


def test_a_failure_reaches_the_stream_at_once(client: httpx2.Client, owner: ScriptedOwner) -> None:
    error = {"message": "the engine broke", "type": "server_error", "param": None, "code": "engine_error"}
    with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response:
        ride = owner.claim(response.headers["x-carpool-job-id"])
        started = time.monotonic()
        owner.finish(ride, "failed", "error", error=json.dumps(error))
        (event,) = tokens_of(response)
        assert time.monotonic() - started < 1
    assert event.data is not None
    assert event.data["error"] == error


def test_another_owner_goes_on_in_the_same_stream(client: httpx2.Client, owner: ScriptedOwner) -> None:
    with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response:
        ride = owner.claim(response.headers["x-carpool-job-id"])
        owner.write(ride, " a", " b")
        owner.ledger.run(owner.calls.release(ride.rider))
        again = owner.claim(ride.id)
        assert again.k == 2
        owner.write(again, " c")
        owner.finish(again)
        events = tokens_of(response)
    assert [event.id for event in events] == ["1", "2", "3", "3.end"]


def test_the_heartbeat_says_what_is_true(client: httpx2.Client, owner: ScriptedOwner, settings: Settings) -> None:
    for _ in range(2):
        submit(client)
    with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response:
        comments = events_of(response)
        assert next(comments).comment == "queued at position 3, no worker is ready"
        owner.heartbeat()
        assert any(event.comment == "queued at position 3" for event in comments)
        ride = owner.claim(response.headers["x-carpool-job-id"])
        owner.write(ride, *(["x"] * 17))
        assert any(event.comment == "riding, 17 tokens" for event in comments)
        owner.client.hset(keys.record(ride.id), "lease", str(int((time.time() - 4) * 1000)))
        assert any(event.comment.startswith("stalled, its worker's lease ran out 4 s ago") for event in comments)


def test_a_message_that_was_never_delivered_is_found_in_the_log(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner
) -> None:
    with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response:
        ride = owner.claim(response.headers["x-carpool-job-id"])
        owner.write(ride, " a")
        events = events_of(response)
        assert next(event for event in events if event.data).id == "1"
        # written past the script's PUBLISH, as if the connection had swallowed it
        owner.client.xadd(
            keys.log(ride.id), {"d": '{"v":1,"t":"tokens","n":2,"ids":[2],"text":[" b"]}'}, f"{ride.epoch}-2"
        )
        owner.client.hset(keys.record(ride.id), "k", "2")
        assert next(event for event in events if event.data).id == "2"


def test_a_slow_client_falls_back_to_the_log_and_gets_everything(redis_url: str, owner: ScriptedOwner) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", stream_queue=4)
    tokens = [f"{number} " + "x" * 4000 for number in range(1500)]
    with (
        running_api(settings) as api,
        api.client() as client,
        client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response,
    ):
        owner.run(tokens, response.headers["x-carpool-job-id"])  # six megabytes that nobody reads meanwhile
        got = [event.data["token"] for event in tokens_of(response) if event.data]
    assert got[:-1] == tokens


def test_a_group_is_followed_as_one_and_taken_up_again(client: httpx2.Client, owner: ScriptedOwner) -> None:
    answers: list[httpx2.Response] = []
    post = threading.Thread(target=lambda: answers.append(client.post("/generate", json={"prompts": ["a", "b"]})))
    post.start()
    id = owner.next_job().rpartition(".")[0]
    first = owner.claim(f"{id}.0")
    owner.write(first, " x")
    second = owner.claim(f"{id}.1")
    owner.write(second, " y", " z")
    owner.finish(second)
    owner.finish(first)
    post.join()
    events = replay(client, id)
    assert {event.id for event in events} >= {"1.end,2.end"}
    by_child: dict[str, list[str]] = {}
    for event in events:
        assert event.data is not None
        by_child.setdefault(event.data["sequence_id"], []).append(event.data["token"])
    assert by_child == {f"{id}.0": [" x", ""], f"{id}.1": [" y", " z", ""]}
    rest = replay(client, id, "1.end,1")
    assert [event.id for event in rest] == ["1.end,2", "1.end,2.end"]
    assert client.get(f"/jobs/{id}/stream", headers={"Last-Event-ID": "1.end,2.end"}).status_code == 204


def test_more_than_sixteen_children_are_not_followed_as_one(client: httpx2.Client, owner: ScriptedOwner) -> None:
    post = threading.Thread(target=lambda: client.post("/generate", json={"prompts": ["a"] * 17}))
    post.start()
    id = owner.next_job().rpartition(".")[0]
    response = client.get(f"/jobs/{id}/stream")
    assert response.status_code == 400
    assert f"/jobs/{id}.0/stream" in response.json()["error"]["message"]
    client.post(f"/jobs/{id}/cancel")
    post.join()


def test_more_streams_than_allowed_are_refused_and_a_closed_one_makes_room(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_streams=1)
    with running_api(settings) as api, api.client() as client:
        with client.stream("POST", "/generate_stream", json={"prompt": "Hello"}):
            response = client.post("/generate_stream", json={"prompt": "Hello"})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "too_many_streams"
            assert "retry-after" in response.headers
        id = submit(client)
        until(lambda: client.get(f"/jobs/{id}/stream?starting_after=0.end").status_code == 204)
        client.post(f"/jobs/{id}/cancel")
        until(lambda: client.get(f"/jobs/{id}/stream").status_code == 200)


def test_a_stream_whose_record_expires_says_so(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = submit(client)
    with client.stream("GET", f"/jobs/{id}/stream") as response:
        owner.client.delete(keys.record(id), keys.log(id))
        (event,) = tokens_of(response)
    assert event.data is not None
    assert event.data["error"]["code"] == "job_not_found"


def test_two_thousand_short_streams_leave_no_subscription(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    id = submit(client)
    owner.run([" a"], id)
    for _ in range(2000):
        assert client.get(f"/jobs/{id}/stream").status_code == 200
    until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
    until(lambda: not redis_client.pubsub_channels("{carpool}:*:c:*"))


def test_three_hundred_open_streams_take_no_connection_each(
    api: ApiServer, owner: ScriptedOwner, redis_client: redis.Redis
) -> None:
    limits = httpx2.Limits(max_connections=400, max_keepalive_connections=400)
    with api.client(limits=limits) as client:
        id = submit(client)
        streams = [client.stream("GET", f"/jobs/{id}/stream") for _ in range(300)]
        responses = [stream.__enter__() for stream in streams]
        before = redis_client.info("clients")["connected_clients"]
        assert int(before) < 100
        owner.run([" a"], id)
        assert all([event.id for event in tokens_of(response)] == ["1", "1.end"] for response in responses)
        for stream in streams:
            stream.__exit__(None, None, None)


def test_streams_go_on_after_an_outage_of_redis(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url, engine="simulated", sse_heartbeat_s=0.5, redis_timeout_s=0.5)
    with (
        running_api(settings) as api,
        api.client() as client,
        ScriptedOwner(settings) as owner,
        client.stream("POST", "/generate_stream", json={"prompt": "Hello"}) as response,
    ):
        ride = owner.claim(response.headers["x-carpool-job-id"])
        owner.write(ride, " a")
        events = events_of(response)
        assert next(event for event in events if event.data).id == "1"
        own_redis.stop()
        assert any("Redis does not answer" in event.comment for event in events)
        own_redis.start()
        owner.write(ride, " b")
        owner.finish(ride)
        assert [event.id for event in events if event.data] == ["2", "2.end"]


def test_a_job_with_logprobs_streams_them(client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = submit(client, logprobs=1)
    ride = owner.claim(id)
    top = TokenLogprob(id=1, lp=-0.5, b=[32, 98])
    owner.write(ride, " a", "", lp=[TokenLogprob(id=2, lp=-2.0, b=[32, 97], top=[top])] * 2)
    owner.finish(ride, tail=" c")
    *tokens, end = replay(client, id)
    likely = [{"token": " b", "logprob": -0.5, "bytes": [32, 98]}]
    for event in tokens:
        assert event.data is not None
        assert event.data["logprobs"] == {
            "token": " a",
            "logprob": -2.0,
            "bytes": [32, 97],
            "top_logprobs": likely,
        }
    assert end.data is not None
    assert "logprobs" not in end.data
