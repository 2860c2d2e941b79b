"""`/v1/batches` with OpenAI's own client: what becomes of each line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest
import redis
from openai.types import Batch

from tasks import keys
from tasks.job_request import child_seed
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.batch_lines import CHAT, COMPLETIONS, ENDED, RESPONSES, answers_of, by_custom_id, chat_line, line, submit
from tests.openai_clients import chat_text, openai_client
from tests.scripted_owner import ScriptedOwner
from tests.service import eventually, simulated_text

BOUND_S = 60.0


@pytest.fixture
def client(simulated_api: ApiServer) -> Iterator[openai.OpenAI]:
    with openai_client(simulated_api) as client:
        yield client


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", reaper_tick_s=0.1)


def ended(client: openai.OpenAI, id: str) -> Batch:
    """The batch, once it has ended."""

    def look() -> Batch | None:
        batch = client.batches.retrieve(id)
        return batch if batch.status in ENDED else None

    found = eventually(f"batch {id} ends", look, BOUND_S)
    assert isinstance(found, Batch)
    return found


def run(client: openai.OpenAI, lines: Sequence[str], endpoint: Any = CHAT) -> Batch:
    return ended(client, submit(client, lines, endpoint).id)


def test_two_hundred_lines_are_each_answered_once_and_right(client: openai.OpenAI) -> None:
    made = submit(client, [chat_line(i) for i in range(200)], metadata={"of": "me"})
    assert (made.object, made.status, made.endpoint, made.completion_window) == ("batch", "validating", CHAT, "24h")
    assert made.expires_at == made.created_at + 86400
    batch = ended(client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 200, "completed": 200, "failed": 0}
    assert (batch.error_file_id, batch.errors, batch.metadata) == (None, None, {"of": "me"})
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=lambda at: at or 0)
    assert None not in times
    answers = answers_of(client, batch.output_file_id)
    assert len(answers) == 200
    assert len({answer["id"] for answer in answers}) == 200
    found = by_custom_id(answers)
    for i in range(200):
        answer = found[f"line-{i}"]
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        body = answer["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == chat_text([("user", f"Say {i}")], i, 3)


def test_lines_are_ordinary_jobs_of_low_priority(client: openai.OpenAI, simulated_api: ApiServer) -> None:
    batch = run(client, [chat_line(0), chat_line(1, n=2), chat_line(2, priority="high")])
    answers = by_custom_id(answers_of(client, batch.output_file_id))
    with simulated_api.client() as http:
        views = [http.get(f"/jobs/{answers[f'line-{i}']['response']['request_id']}").json() for i in range(3)]
        child = http.get(f"/jobs/{views[1]['children'][1]}").json()
        listed = {job["id"] for job in http.get("/jobs").json()["data"]}
    assert [view["status"] for view in views] == ["succeeded"] * 3
    assert [view["priority"] for view in (*views, child)] == [9, 9, 1, 9]
    assert [view["id"] for view in views] == [f"chatcmpl-{batch.id.removeprefix('batch_')}.{n}" for n in (1, 2, 3)]
    assert not listed & {view["id"] for view in views}
    choices = answers["line-1"]["response"]["body"]["choices"]
    assert [choice["message"]["content"] for choice in choices] == [
        chat_text([("user", "Say 1")], child_seed(1, index), 3) for index in range(2)
    ]


def test_completions_are_answered_as_their_endpoint_does(client: openai.OpenAI) -> None:
    body = {"model": "gpt-4o-mini", "prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 4}
    lines = [
        line("plain", COMPLETIONS, body),
        line("more", COMPLETIONS, {**body, "n": 1, "logprobs": 2}),
        line("echo", COMPLETIONS, {**body, "echo": True}),
    ]
    batch = run(client, lines, COMPLETIONS)
    assert batch.status == "completed"
    found = by_custom_id(answers_of(client, batch.output_file_id))
    texts = [simulated_text(prompt, child_seed(3, index), 4) for index, prompt in enumerate("aabb")]
    plain = found["plain"]["response"]["body"]
    assert plain["model"] == "simulated"
    assert [choice["text"] for choice in plain["choices"]] == texts
    assert plain["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    echo = found["echo"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in echo] == [prompt + text for prompt, text in zip("aabb", texts, strict=True)]
    direct = client.completions.create(**{**body, "n": 1, "logprobs": 2})  # type: ignore[call-overload]
    assert found["more"]["response"]["body"]["choices"] == direct.to_dict()["choices"]


def test_responses_can_be_asked_for_and_gone_on_with(client: openai.OpenAI) -> None:
    body = {"model": "simulated", "input": "Hello", "max_output_tokens": 4, "seed": 1, "metadata": {"a": "b"}}
    batch = run(client, [line("first", RESPONSES, body)], RESPONSES)
    (answer,) = answers_of(client, batch.output_file_id)
    response = client.responses.retrieve(answer["response"]["body"]["id"])
    assert response.to_dict() == answer["response"]["body"]
    assert response.output_text == chat_text([("user", "Hello")], 1, 4)
    follow = [
        line("next", RESPONSES, {**body, "previous_response_id": response.id}),
        line("lost", RESPONSES, {**body, "previous_response_id": "resp_none"}),
    ]
    batch = run(client, follow, RESPONSES)
    (answer,) = answers_of(client, batch.output_file_id)
    turns = [("user", "Hello"), ("assistant", response.output_text), ("user", "Hello")]
    assert client.responses.retrieve(answer["response"]["body"]["id"]).output_text == chat_text(turns, 1, 4)
    (refused,) = answers_of(client, batch.error_file_id)
    assert refused["response"]["status_code"] == 404
    assert refused["response"]["body"]["error"]["param"] == "previous_response_id"


BAD_BODIES: Mapping[str, tuple[dict[str, Any], int, str, str | None]] = {
    "no such model": ({"model": "gpt-9"}, 404, "model_not_found", "model"),
    "an unknown field": ({"colour": "red"}, 400, "unsupported_field", "colour"),
    "a bad value": ({"temperature": 3}, 400, "invalid_request", "temperature"),
    "no messages": ({"messages": []}, 400, "invalid_request", "messages"),
    "too long": ({"max_completion_tokens": 9000}, 400, "context_length_exceeded", "max_completion_tokens"),
    "a stream": ({"stream": True}, 400, "unsupported_field", "stream"),
    "a webhook": ({"webhook_url": "https://example.com/"}, 400, "unsupported_field", "webhook_url"),
    "half a surrogate": ({"user": "\ud800"}, 400, "invalid_request", "user"),
    "too many": ({"n": 17}, 400, "invalid_request", "n"),
    "what fails": ({"messages": [{"role": "user", "content": "x [[raise]]@1"}]}, 500, "engine_error", None),
    "no time": ({"deadline_s": 0.000001}, 504, "deadline_exceeded", None),
}


def test_a_line_that_does_not_succeed_is_in_the_error_file_as_its_endpoint_would_answer(client: openai.OpenAI) -> None:
    good = [chat_line(1), chat_line(2)]
    bad = [chat_line(3, custom_id=name, max_tokens=None, **fields) for name, (fields, *_) in BAD_BODIES.items()]
    batch = run(client, [good[0], *bad, good[1]])
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": len(bad) + 2, "completed": 2, "failed": len(bad)}
    assert set(by_custom_id(answers_of(client, batch.output_file_id))) == {"line-1", "line-2"}
    found = by_custom_id(answers_of(client, batch.error_file_id))
    for name, (_, status, code, param) in BAD_BODIES.items():
        response = found[name]["response"]
        error = response["body"]["error"]
        assert (response["status_code"], error["code"], error["param"]) == (status, code, param), name
        assert found[name]["error"] is None


def test_a_file_with_lines_that_are_no_requests_fails_with_each_of_them_named(client: openai.OpenAI) -> None:
    good = json.loads(chat_line(0))
    lines = [
        chat_line(0),
        "{no json",
        "",
        "[]",
        chat_line(0),
        json.dumps({**good, "custom_id": 7}),
        json.dumps({**good, "custom_id": "\ud800"}),
        json.dumps({**good, "custom_id": "a", "method": "GET"}),
        json.dumps({**good, "custom_id": "b", "url": "/v1/completions"}),
        json.dumps({**good, "custom_id": "c", "body": "x"}),
        json.dumps({**good, "custom_id": "d", "colour": "red"}),
        json.dumps({"custom_id": "e", "method": "POST", "url": CHAT}),
        '{"custom_id": "f", "method": "POST", "url": "/v1/chat/completions", "body": {"seed": NaN}}',
        "[" * 100_000,
    ]
    batch = run(client, lines)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_custom_id", "custom_id"),
        (7, "invalid_custom_id", "custom_id"),
        (8, "invalid_method", "method"),
        (9, "invalid_url", "url"),
        (10, "invalid_body", "body"),
        (11, "unsupported_field", "colour"),
        (12, "missing_required_parameter", "body"),
        (13, "invalid_json_line", None),
        (14, "invalid_json_line", None),
    ]


@pytest.mark.parametrize("data", ["", "\n\n  \n"])
def test_a_file_without_requests_fails(client: openai.OpenAI, data: str) -> None:
    batch = run(client, [data])
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["empty_file"]


def test_a_line_longer_than_a_body_may_be_is_named(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings.model_copy(update={"max_body_bytes": 2000})) as api, openai_client(api) as client:
        batch = run(client, [chat_line(0), "x" * 600_000, chat_line(1), "y" * 2001])
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [(2, "line_too_long"), (4, "line_too_long")]


def test_what_cannot_be_a_batch_is_refused(client: openai.OpenAI, simulated_api: ApiServer) -> None:
    file = client.files.create(file=chat_line(0).encode(), purpose="batch").id
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.post("/batches", body={**good, **wrong}, cast_to=object)
        assert refusal.value.param == param
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            call("batch_none")
        assert missing.value.code == "batch_not_found"
    with pytest.raises(openai.NotFoundError) as no_file:
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    assert (no_file.value.code, no_file.value.param) == ("file_not_found", "input_file_id")
    output = run(client, [chat_line(0)]).output_file_id
    with pytest.raises(openai.BadRequestError, match="purpose batch is needed"):
        client.batches.create(input_file_id=str(output), endpoint=CHAT, completion_window="24h")


def test_batches_are_listed_and_an_idempotency_key_makes_one(settings: Settings) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        made = [submit(client, [chat_line(0)]).id for _ in range(3)]
        assert [batch.id for batch in client.batches.list()] == made[::-1]
        assert [batch.id for batch in client.batches.list(limit=1)] == made[::-1]
        assert [batch.id for batch in client.batches.list(after=made[1])] == made[:1]
        with pytest.raises(openai.NotFoundError):
            client.batches.list(after="batch_none")
        file = client.files.create(file=b"{}", purpose="batch").id
        key = {"Idempotency-Key": "batch-1"}

        def create(**more: Any) -> str:
            fields: Any = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **more}
            return client.batches.create(**fields, extra_headers=key).id

        assert create() == create()
        with pytest.raises(openai.ConflictError):
            create(metadata={"a": "b"})


def test_answers_can_be_read_while_the_batch_runs(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        batch = submit(client, [chat_line(i) for i in range(3)])
        second, first = owner.claim(), owner.claim()
        owner.write(first, " hello")
        owner.finish(first)
        now = eventually("a line is there", lambda: _with_output(client, batch.id))
        assert now.status == "in_progress"
        assert [answer["custom_id"] for answer in answers_of(client, now.output_file_id)] == ["line-1"]
        for file in (batch.input_file_id, now.output_file_id):
            with pytest.raises(openai.ConflictError) as refusal:
                client.files.delete(file)
            assert refusal.value.code == "file_in_use"
        owner.finish(second)
        owner.run([" last"])
        done = ended(client, batch.id)
        assert [answer["custom_id"] for answer in answers_of(client, done.output_file_id)] == [
            "line-1", "line-0", "line-2",
        ]  # fmt: skip
        assert client.files.delete(batch.input_file_id).deleted


def _with_output(client: openai.OpenAI, id: str) -> Batch | None:
    batch = client.batches.retrieve(id)
    return batch if batch.output_file_id else None


def test_a_cancelled_batch_keeps_what_was_answered_and_names_all_the_rest(
    settings: Settings, owner: ScriptedOwner
) -> None:
    small = settings.model_copy(update={"batch_window": 4})
    with running_api(small) as api, openai_client(api) as client:
        batch = submit(client, [chat_line(i) for i in range(300)])
        owner.run([" hello"])
        riding = owner.claim()
        assert client.batches.cancel(batch.id).status == "cancelling"
        until(lambda: owner.look(riding) == "cancelled")
        until(lambda: client.batches.retrieve(batch.id).request_counts.failed >= 298)  # type: ignore[union-attr]
        assert client.batches.retrieve(batch.id).status == "cancelling"
        owner.finish(riding, "cancelled", "cancelled")
        done = ended(client, batch.id)
        assert (done.status, done.cancelled_at is None) == ("cancelled", False)
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert [answer["custom_id"] for answer in answers_of(client, done.output_file_id)] == ["line-0"]
        errors = answers_of(client, done.error_file_id)
        assert sorted(answer["custom_id"] for answer in errors) == sorted(f"line-{i}" for i in range(1, 300))
        assert {(answer["error"]["code"], answer["response"]) for answer in errors} == {("batch_cancelled", None)}


def test_a_batch_whose_time_is_over_keeps_what_was_answered_and_names_all_the_rest(
    settings: Settings, owner: ScriptedOwner
) -> None:
    small = settings.model_copy(update={"batch_window": 4})
    with running_api(small) as api, openai_client(api) as client:
        file = client.files.create(file="\n".join(chat_line(i) for i in range(20)).encode(), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        owner.client.hset(keys.batch(batch.id), "deadline", round(time.time() * 1000) + 1500)
        owner.run([" hello"])
        done = ended(client, batch.id)
        assert (done.status, done.expired_at is None) == ("expired", False)
        (answer,) = answers_of(client, done.output_file_id)
        errors = answers_of(client, done.error_file_id)
        assert len({answer["custom_id"], *(error["custom_id"] for error in errors)}) == 20
        assert {error["error"]["code"] for error in errors} == {"batch_expired"}


def test_a_batch_waits_behind_a_job_that_comes_later(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, openai_client(api) as client, api.client() as http:
        batch = submit(client, [chat_line(i) for i in range(2)])
        owner.next_job()
        job = http.post("/jobs", json={"prompt": "x"}).json()["id"]
        assert owner.next_job() == job
        low = http.post("/jobs", json={"prompt": "x", "priority": 9}).json()
        assert (low["priority"], low["queue_position"]) == (9, 4)
        for wrong in (10, -1, "urgent", 1.5, True):
            assert http.post("/jobs", json={"prompt": "x", "priority": wrong}).json()["error"]["param"] == "priority"
        client.batches.cancel(batch.id)


def test_a_process_serves_what_no_other_does(
    settings: Settings, owner: ScriptedOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.batches.runner._MAX_SERVED", 1)
    with running_api(settings) as first, running_api(settings), openai_client(first) as client:
        batches = [submit(client, [chat_line(i)]) for i in range(2)]
        for batch in batches:
            eventually(f"{batch.id} begins", lambda batch=batch: client.batches.retrieve(batch.id).in_progress_at)  # type: ignore[misc]


def test_while_the_server_is_full_answers_are_written_and_no_line_is_taken(
    redis_url: str, redis_client: redis.Redis
) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", batch_window=1)
    with ScriptedOwner(settings) as owner, running_api(settings) as api, openai_client(api) as client:
        batch = submit(client, [chat_line(i) for i in range(2)])
        first = owner.claim()
        redis_client.config_set("maxmemory", 1)
        try:
            owner.finish(first)
            eventually("the answer is written", lambda: _with_output(client, batch.id))
            with pytest.raises(openai.InternalServerError) as refusal:
                client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            assert refusal.value.code == "redis_full"
            with pytest.raises(openai.InternalServerError):
                client.files.create(file=b"x", purpose="batch")
            assert client.batches.retrieve(batch.id).status == "in_progress"
            assert not redis_client.exists(keys.record(first.id.replace(".1", ".2")))
        finally:
            redis_client.config_set("maxmemory", 0)
        owner.run([" hello"])
        assert ended(client, batch.id).status == "completed"


def test_a_line_is_not_forgotten_before_its_answer_is_written(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, openai_client(api) as client, api.client() as http:
        batch = submit(client, [chat_line(0)])
        id = owner.next_job()
        # with nobody to write its answer
        api.call(api.service.stop)
        owner.client.set(keys.batch_lock(batch.id), "another")
        owner.run([" hello"])
        refused = http.delete(f"/jobs/{id}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_not_ended")
