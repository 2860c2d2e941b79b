"""A queue that is full: who is sent away, with what, and that nobody who was let in fails for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tasks import keys
from tasks.chat_template import ChatTemplate
from tasks.registry import publish_card
from tasks.settings import Settings
from tests.api_process import ApiProcess
from tests.api_server import ApiServer, events_of, running_api, until
from tests.burst import burst
from tests.openai_clients import openai_client
from tests.scripted_owner import ScriptedOwner
from tests.service import Service, simulated_text

RATE_LIMITS = ("limit", "remaining", "reset")


def settings_with(redis_url: str, **more: Any) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", **more)


@pytest.fixture
def api(redis_url: str) -> Iterator[ApiServer]:
    """An API in whose queue three jobs have room."""
    with running_api(settings_with(redis_url, max_queued_jobs=3)) as api:
        yield api


def fill(client: httpx2.Client, n: int = 3) -> list[str]:
    answers = [client.post("/jobs", json={"prompt": "Hello", "max_tokens": 5}) for _ in range(n)]
    assert {answer.status_code for answer in answers} == {202}
    return [answer.json()["id"] for answer in answers]


def test_of_five_hundred_at_once_a_hundred_come_in_and_the_rest_is_sent_away_at_once(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    settings = settings_with(redis_url, max_queued_jobs=100)
    with ApiProcess(settings, tmp_path) as api:
        answers = burst(api.url, "/jobs", [{"prompt": f"number {i}", "max_tokens": 3, "seed": 7} for i in range(500)])
        accepted = [answer for answer in answers if answer.status == 202]
        refused = [answer for answer in answers if answer.status != 202]
        assert len(accepted) == 100
        assert {answer.status for answer in refused} == {503}
        assert {answer.body["error"]["code"] for answer in refused} == {"queue_full"}
        assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in refused)
        assert max(answer.seconds for answer in refused) < 3, "a second, on a machine that has nothing else to do"
        assert redis_client.zcard(keys.wait("simulated")) == 100
        with Service(redis_url, tmp_path) as service:
            service.worker()
            for answer in accepted:
                job = service.wait_for_end(answer.body["id"])
                assert (job["status"], job["usage"]["completion_tokens"]) == ("succeeded", 3)


def test_with_workers_there_are_never_more_in_the_queue_than_may_be(redis_url: str, tmp_path: Path) -> None:
    """Four clients that submit as fast as they can, a worker that is killed meanwhile."""
    most, seen, done = 20, [0], threading.Event()

    def watch(service: Service) -> None:
        while not done.is_set():
            seen.append(int(service.client.zcard(keys.wait("simulated"))))

    def submit(url: str, number: int) -> list[str]:
        ids: list[str] = []
        with httpx2.Client(base_url=url, trust_env=False) as client:
            while not done.is_set():
                body = {"prompt": f"{number} {len(ids)}", "max_tokens": 8, "seed": 7}
                answer = client.post("/jobs", json=body)
                assert answer.status_code in (202, 503)
                if answer.status_code == 202:
                    ids.append(answer.json()["id"])
        return ids

    settings = settings_with(redis_url, max_queued_jobs=most)
    with (
        ApiProcess(settings, tmp_path) as api,
        Service(redis_url, tmp_path, lease_s=1, renew_s=0.3, grace_s=0.5, simulated_step_ms=1) as service,
        ThreadPoolExecutor(5) as threads,
    ):
        first = service.worker("first")
        watcher = threads.submit(watch, service)
        clients = [threads.submit(submit, api.url, number) for number in range(4)]
        until(lambda: max(seen) >= most, 30)
        first.end()
        service.worker("second")
        time.sleep(1)  # for as long as this lasts, everything happens at once
        done.set()
        ids = [id for one in clients for id in one.result(30)]
        watcher.result(30)
        # what is handed back or lost its worker is let in again, whoever else waits: at most the slots
        assert max(seen) <= most + 4
        assert len(ids) > most
        assert {service.wait_for_end(id)["status"] for id in ids} == {"succeeded"}


def test_a_refusal_has_the_numbers_and_a_pause(client: httpx2.Client, redis_client: redis.Redis) -> None:
    fill(client)
    answer = client.post("/jobs", json={"prompt": "Hello"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "queue_full", "server_error")
    assert "3 jobs wait, 1 more are asked for, and at most 3 may wait (CARPOOL_MAX_QUEUED_JOBS)" in error["message"]
    assert answer.headers["retry-after"] == "10", "nobody knows how fast the queue moves"
    assert "x-carpool-job-id" not in answer.headers
    assert len(list(redis_client.scan_iter("{carpool}:j:*"))) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/basic_generate", {"prompt": "x"}),
        ("/generate", {"prompts": ["x", "y"]}),
        ("/generate_stream", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses", {"input": "x", "background": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
    ],
)
def test_every_endpoint_is_refused_alike_before_anything_is_answered(
    client: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    fill(client)
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"


def test_the_same_request_again_gets_its_job_however_full_the_queue_is(client: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "order-17"}
    first = client.post("/jobs", json={"prompt": "Hello"}, headers=headers).json()
    fill(client, 2)
    assert client.post("/jobs", json={"prompt": "Hello"}).status_code == 503
    again = client.post("/jobs", json={"prompt": "Hello"}, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])


def test_a_group_that_can_never_come_in_is_told_so(client: httpx2.Client) -> None:
    answer = client.post("/generate", json={"prompts": ["x"] * 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "larger_than_queue")
    assert "4 jobs, and at most 3 may wait" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers


def test_answers_say_how_full_the_queue_is_as_openai_s_do(client: httpx2.Client) -> None:
    answer = client.post("/jobs", json={"prompt": "Hello"})
    found = {name: answer.headers.get(f"x-ratelimit-{name}-requests") for name in RATE_LIMITS}
    assert found == {"limit": "3", "remaining": "2", "reset": "2m0s"}, "nobody knows when it is empty"
    assert not any("tokens" in name for name in answer.headers if name.startswith("x-ratelimit"))
    fill(client, 2)
    assert client.post("/jobs", json={"prompt": "x"}).headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-requests" not in client.get("/jobs").headers


def test_an_owner_s_own_limit_is_429_which_openai_s_client_knows(redis_url: str) -> None:
    settings = settings_with(redis_url, max_queued_jobs_per_key=2, max_queued_tokens_per_key=100)
    with running_api(settings) as api, api.client() as client, openai_client(api) as openai_s:
        first = client.post("/jobs", json={"prompt": "Hello, I am", "max_tokens": 10})
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert [first.headers[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining")] == ["100", "87"]
        too_much = client.post("/jobs", json={"prompt": "Hello, I am", "max_tokens": 90})
        assert (too_much.status_code, too_much.json()["error"]["code"]) == (429, "too_many_queued")
        assert (
            "13 tokens of this key wait, 93 more are asked for, and at most 100" in too_much.json()["error"]["message"]
        )
        fill(client, 1)
        with pytest.raises(openai.RateLimitError) as refused:
            openai_s.completions.create(model="simulated", prompt="x", max_tokens=5)
        assert refused.value.code == "too_many_queued"
        assert refused.value.type == "rate_limit_error"
        assert refused.value.response.headers["retry-after"] == "10"
        never = client.post("/jobs", json={"prompt": "Hello, I am", "max_tokens": 98})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
        assert "at most 100 may wait (CARPOOL_MAX_QUEUED_TOKENS_PER_KEY)" in never.json()["error"]["message"]
        group = client.post("/generate", json={"prompts": ["x"] * 3}).json()["error"]
        assert "3 jobs, and at most 2 may wait (CARPOOL_MAX_QUEUED_JOBS_PER_KEY)" in group["message"]


def test_prompts_are_counted_with_the_model_s_tokenizer_where_tokens_have_a_cap(redis_url: str) -> None:
    settings = settings_with(redis_url, max_queued_tokens=40)
    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    template = ChatTemplate("{% for message in messages %}? {{ message.content }} {% endfor %}?")
    with ScriptedOwner(settings, context_length=1000) as first:
        card = publish_card(first.client, tokenizer.to_str(), template)
    with ScriptedOwner(settings, context_length=1000, card=card), running_api(settings) as api, api.client() as client:

        def left(answer: httpx2.Response) -> int:
            assert answer.status_code == 202
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert left(client.post("/jobs", json={"prompt": "word " * 7, "max_tokens": 3})) == 30
        chat = [{"role": "user", "content": "word word word"}]
        assert left(client.post("/jobs", json={"messages": chat, "max_tokens": 5})) == 20
        group = client.post("/v1/responses", json={"input": "word", "max_output_tokens": 6, "background": True})
        assert group.headers["x-ratelimit-remaining-tokens"] == str(20 - 9)
        full = client.post("/jobs", json={"prompt": "word " * 9, "max_tokens": 3})
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        assert "29 tokens wait, 12 more are asked for, and at most 40" in full.json()["error"]["message"]


def test_a_pause_is_as_long_as_the_queue_needs(redis_url: str) -> None:
    settings = settings_with(redis_url, max_queued_jobs=3)
    with ScriptedOwner(settings) as owner, running_api(settings) as api, api.client() as client:
        owner.heartbeat()
        # 40 tokens that took four seconds, by what was measured
        owner.client.hset(keys.rate("simulated"), mapping={"jobs": 1, "ms": 4000, "square": 16e6, "tokens": 40})
        ids = [client.post("/jobs", json={"prompt": "x", "max_tokens": 400}).json()["id"] for _ in range(3)]
        answer = client.post("/jobs", json={"prompt": "x"})
        assert answer.headers["retry-after"] == "10", "40 s a job, of which four ride at once"
        assert answer.headers["x-ratelimit-reset-requests"] == "30s"
        owner.client.hset(keys.rate("simulated"), mapping={"ms": 400_000, "square": 16e10})
        assert client.post("/jobs", json={"prompt": "x"}).headers["retry-after"] == "120", "no longer than that"
        job = client.get(f"/jobs/{ids[2]}").json()
        assert (job["queue_position"], job["eta_s"]) == (3, 4000)
        listed = client.get("/jobs").json()["data"]
        assert [one["queue_position"] for one in listed] == [3, 2, 1]


def test_a_job_that_would_be_late_is_refused_where_that_is_wanted(redis_url: str) -> None:
    settings = settings_with(redis_url, refuse_late=True)
    with ScriptedOwner(settings) as owner, running_api(settings) as api, api.client() as client:
        owner.heartbeat()
        owner.client.hset(keys.rate("simulated"), mapping={"jobs": 1, "ms": 4000, "square": 16e6, "tokens": 40})
        late = client.post("/jobs", json={"prompt": "x", "max_tokens": 400, "deadline_s": 30})
        error = late.json()["error"]
        assert (late.status_code, error["code"], error["param"]) == (503, "would_be_late", "deadline_s")
        assert "by itself it takes about 40 s, and its deadline is in 30 s" in error["message"]
        assert "Give it a later deadline_s, or a smaller max_tokens" in error["message"]
        with openai_client(api) as openai_s, pytest.raises(openai.InternalServerError) as refused:
            openai_s.completions.create(model="simulated", prompt="x", max_tokens=400, extra_body={"deadline_s": 30})
        assert refused.value.response.headers["x-should-retry"] == "false", "to wait is of no use"
        body = {"prompt": "x", "max_tokens": 400, "deadline_s": 41}
        assert [client.post("/jobs", json=body).status_code for _ in range(4)] == [202] * 4
        late = client.post("/jobs", json=body)
        assert "done in about 80 s, and its deadline is in 41 s" in late.json()["error"]["message"]
        assert late.headers["retry-after"] == "39"


def test_a_silent_stream_says_when_its_job_will_be_done(redis_url: str) -> None:
    settings = settings_with(redis_url, sse_heartbeat_s=0.1)
    with ScriptedOwner(settings) as owner, running_api(settings) as api, api.client() as client:
        owner.heartbeat()
        owner.client.hset(keys.rate("simulated"), mapping={"jobs": 1, "ms": 4000, "square": 16e6, "tokens": 40})
        with client.stream("POST", "/generate_stream", json={"prompt": "x", "max_tokens": 100}) as response:
            comment = next(event.comment for event in events_of(response) if event.comment)
    assert comment == "queued at position 1, done in about 10 s"


def test_a_batch_waits_outside_and_goes_on_as_there_is_room(redis_url: str, tmp_path: Path) -> None:
    settings = settings_with(redis_url, max_queued_jobs=5)
    lines = b"".join(
        b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "line %d", '
        b'"model": "simulated", "seed": 7, "max_tokens": 4}}\n' % (i, i)
        for i in range(30)
    )
    with Service(redis_url, tmp_path) as service, running_api(settings) as api, api.client() as client:
        upload = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines)})
        file = upload.json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=body).json()["id"]
        waiting = keys.wait("simulated")
        until(lambda: service.client.zcard(waiting) == 5)
        mine = fill(client, 5)
        assert client.post("/jobs", json={"prompt": "x"}).status_code == 503
        assert service.client.zcard(waiting) == 10
        service.worker()
        for id in mine:
            service.wait_for_end(id)
        until(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed", 40)
        found = client.get(f"/v1/batches/{batch}").json()
        assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        content = client.get(f"/v1/files/{found['output_file_id']}/content").text
        assert simulated_text("line 17", 7, 4) in content
