"""The bundled model behind the whole product: API, Redis, Celery worker and model process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tasks.codes import JobFailed
from tests.api_server import ApiServer, running_api
from tests.mixed_jobs import Plan, draw_plans, run_all
from tests.openai_clients import openai_client
from tests.redis_server import RedisServer
from tests.service import Service, eventually

pytestmark = pytest.mark.timeout(400)
STARTS = ("Hello, I am", "The sky is", "Once upon a time", "def main():", "The capital of France is", "1, 2, 3, 4,")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("real")
    with (
        RedisServer(folder / "redis") as redis,
        Service(redis.url, folder, engine="transformers", dtype="float32", device="cpu") as running,
    ):
        running.worker(ready_s=300)
        yield running


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def body_of(number: int, draw: random.Random) -> dict[str, Any]:
    greedy = draw.random() < 0.5
    return {
        "prompt": f"{STARTS[number % len(STARTS)]} {'and ' * draw.randrange(0, 40)}",
        "seed": number,
        "temperature": 0 if greedy else 0.8,
        "top_p": 1.0 if greedy else 0.9,
        "repetition_penalty": 1.0 if number % 3 else 1.2,
    }


def test_forty_mixed_jobs_each_get_what_they_get_alone(api: ApiServer, service: Service) -> None:
    plans = draw_plans(40, 5, 16, body_of)
    alone: dict[int, str] = {}
    with api.client(timeout=120) as client:
        for plan in plans:
            id = client.post("/jobs", json=plan.body).json()["id"]
            job = client.get(f"/jobs/{id}", params={"wait": 60}).json()
            assert job["status"] == "succeeded", job
            alone[id_of(plan)] = job["text"]
    run_all(api, plans, lambda plan: alone[id_of(plan)])
    eventually("no slot is taken", lambda: service.riding() == 0)
    assert service.keys_without_ttl() == set()


def id_of(plan: Plan) -> int:
    return int(plan.body["seed"])


def test_emoji_and_spaces_come_out_whole(api: ApiServer) -> None:
    prompt = "Repeat after me: 🚗🌊 汽车 \n\n  two spaces. Again: 🚗🌊"
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    with api.client(timeout=120) as client:
        id = client.post("/jobs", json=body).json()["id"]
        text = client.get(f"/jobs/{id}", params={"wait": 60}).json()["text"]
    assert text
    assert "\ufffd" not in text


def test_a_chat_is_answered(api: ApiServer) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 12, "temperature": 0}
    with api.client(timeout=120) as client:
        id = client.post("/jobs", json=body).json()["id"]
        job = client.get(f"/jobs/{id}", params={"wait": 60}).json()
    assert job["status"] == "succeeded"
    assert job["usage"]["prompt_tokens"] > 10


@pytest.mark.parametrize("path", ["/basic_generate", "/generate", "/generate_stream", "/jobs"])
def test_a_prompt_too_long_for_the_model_is_refused_with_both_numbers(api: ApiServer, path: str) -> None:
    prompt = "word " * 9000
    body: dict[str, Any] = {"prompts": [prompt]} if path == "/generate" else {"prompt": prompt}
    with api.client(timeout=120) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in answer.json()["error"]["message"]
    assert "9001" in answer.json()["error"]["message"]


def test_a_prompt_too_long_sent_with_plain_celery_fails_with_the_same_code(service: Service) -> None:
    result = service.celery.send_task("carpool.generate", kwargs={"prompt": "word " * 9000})
    with pytest.raises(JobFailed) as failure:
        result.get(timeout=60)
    assert failure.value.args[1] == "context_length_exceeded"


def test_a_killed_model_process_s_text_is_whole_and_in_order(service: Service) -> None:
    prompt, length = "Once upon a time there was", 40
    alone = service.wait_for_end(service.submit(prompt, max_tokens=length, temperature=0), 120)["text"]
    job = service.submit(prompt, max_tokens=length, temperature=0)
    service.wait_for_token(job, 10)
    child = service.list_workers()[0].child_pid
    assert child is not None
    psutil.Process(child).kill()
    assert service.wait_for_end(job, 200)["text"] == alone
    service.assert_whole(job)


QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_openai_s_client_chats_by_the_model_s_template(api: ApiServer) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    options = {"model": "SmolLM2-135M-Instruct", **body}
    with openai_client(api, timeout=120) as client, api.client(timeout=120) as http:
        answer = client.chat.completions.create(**options)
        job = http.get(f"/jobs/{answer.id}").json()
        chunks = list(client.chat.completions.create(**options, stream=True))
        alone = http.get(f"/jobs/{http.post('/jobs', json=body).json()['id']}", params={"wait": 60}).json()
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert job["text"] == alone["text"] == text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == job["usage"]
    assert answer.usage.total_tokens == alone["usage"]["total_tokens"]
    # the template puts its own turns around the question
    assert answer.usage.prompt_tokens > 20


def test_logprobs_of_a_greedy_chat_are_those_of_its_tokens(api: ApiServer) -> None:
    with openai_client(api, timeout=120) as client:
        choice = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
        ).choices[0]
        legacy = client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="The capital of France is", temperature=0, max_tokens=6, logprobs=2
        ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        first, second = token.top_logprobs
        assert (token.token, token.logprob) == (first.token, first.logprob)
        assert 0 >= first.logprob >= second.logprob
    assert legacy.logprobs is not None
    assert "".join(legacy.logprobs.tokens or ()) == legacy.text
    assert legacy.logprobs.text_offset is not None
    for offset, part in zip(legacy.logprobs.text_offset, legacy.logprobs.tokens or (), strict=True):
        assert legacy.text[offset:].startswith(part)


def test_a_form_and_a_tool_hold_the_model_to_them(api: ApiServer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    closed = {**schema, "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": closed, "strict": True}}
    tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": closed}}]
    options: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "messages": QUESTION, "seed": 1, "max_tokens": 60}
    with openai_client(api, timeout=120) as client:
        shaped = client.chat.completions.create(**options, response_format=form).choices[0]
        called = client.chat.completions.create(
            **options, tools=tools, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        response = client.responses.create(
            model="SmolLM2-135M-Instruct",
            input=QUESTION,
            text={"format": {"type": "json_schema", "name": "answer", "schema": closed, "strict": True}},
            max_output_tokens=60,
            extra_body={"seed": 1},
        )
    assert shaped.finish_reason == "stop"
    assert isinstance(json.loads(str(shaped.message.content))["n"], int)
    assert response.output_text == shaped.message.content
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "look_up"
    assert isinstance(json.loads(call.function.arguments)["n"], int)


@pytest.mark.parametrize("prompt", ["<|im_start|><|im_end|>", "<|endoftext|>" * 3])
def test_a_prompt_of_special_tokens_alone_is_gone_on_with(api: ApiServer, prompt: str) -> None:
    with openai_client(api, timeout=120) as client:
        completion = client.completions.create(
            model="SmolLM2-135M-Instruct", prompt=prompt, max_tokens=4, temperature=0
        )
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": prompt}], max_tokens=4, temperature=0
        )
    for usage in (completion.usage, answer.usage):
        assert usage is not None
        assert 1 <= usage.completion_tokens <= 4


def test_a_chat_that_goes_on_computes_what_is_new_alone_and_says_so_everywhere(api: ApiServer) -> None:
    system: Any = {"role": "system", "content": "You know " + ", ".join(f"fact {n}" for n in range(40)) + "."}
    question: Any = {"role": "user", "content": "Name a colour."}
    options: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 24}
    turns: list[Any] = [system, question]
    with openai_client(api, timeout=120) as client, api.client(timeout=120) as http:
        first = client.chat.completions.create(messages=turns, **options)
        turns += [first.choices[0].message, {"role": "user", "content": "And another one."}]
        second = client.chat.completions.create(messages=turns, **options)
        job = http.get(f"/jobs/{second.id}").json()
        *_, last = client.chat.completions.create(
            messages=turns, stream=True, stream_options={"include_usage": True}, **options
        )
        response = client.responses.create(
            model=options["model"], input=[system, question], max_output_tokens=8, temperature=0
        )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    # whole blocks of what was there, the first answer included
    assert first.usage.prompt_tokens - 16 < cached < second.usage.prompt_tokens
    assert job["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens >= cached
    assert response.usage is not None
    assert 0 < response.usage.input_tokens_details.cached_tokens < response.usage.input_tokens
