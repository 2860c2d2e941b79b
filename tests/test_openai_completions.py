"""`/v1/models` and `/v1/completions` with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tasks import keys
from tasks.entries import TokenLogprob
from tasks.job_request import child_seed
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, tokens_of
from tests.openai_clients import async_client, chunks_of, openai_client, raw_events
from tests.scripted_owner import ScriptedOwner
from tests.service import simulated_text


@pytest.fixture
def client(simulated_api: ApiServer) -> Iterator[openai.OpenAI]:
    with openai_client(simulated_api) as client:
        yield client


@pytest.fixture
def http(simulated_api: ApiServer) -> Iterator[httpx2.Client]:
    with simulated_api.client() as http:
        yield http


def test_models_are_listed_with_their_aliases(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"simulated", "gpt-4o-mini"}
    model = client.models.retrieve("gpt-4o-mini")
    assert (model.id, model.object, model.owned_by) == ("gpt-4o-mini", "model", "carpool")
    assert model.to_dict()["root"] == "simulated"
    assert model.to_dict()["max_model_len"] == 8192
    for name in ("gpt-9", "ghost"):
        with pytest.raises(openai.NotFoundError) as refusal:
            client.models.retrieve(name)
        assert refusal.value.code == "model_not_found"


def test_an_alias_goes_to_its_model_on_every_endpoint(client: openai.OpenAI, http: httpx2.Client) -> None:
    completion = client.completions.create(model="gpt-4o-mini", prompt="Hello, I am", seed=3)
    assert completion.model == "simulated"
    assert http.post("/jobs", json={"prompt": "x", "model": "gpt-4o-mini"}).json()["model"] == "simulated"
    assert http.post("/jobs", json={"prompt": "x", "model": "ghost"}).status_code == 404


def test_a_completion_is_the_job_of_its_id(client: openai.OpenAI, http: httpx2.Client) -> None:
    raw = client.completions.with_raw_response.create(model="simulated", prompt="Hello, I am", seed=3, user="me")
    completion = raw.parse()
    assert raw.headers["x-carpool-job-id"] == completion.id
    assert raw.headers["location"] == f"/jobs/{completion.id}"
    assert completion.id.startswith("cmpl-")
    assert completion.object == "text_completion"
    (choice,) = completion.choices
    assert choice.text == simulated_text("Hello, I am", 3, 16)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    job = http.get(f"/jobs/{completion.id}").json()
    assert job["text"] == choice.text
    assert job["created_at"] // 1 == completion.created
    assert completion.usage is not None
    assert completion.usage.model_dump(exclude_none=True) == job["usage"]
    assert job["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


def test_an_end_of_sequence_token_and_a_stop_string_end_with_stop(client: openai.OpenAI) -> None:
    ended = client.completions.create(model="simulated", prompt="x [[end]]@4", seed=1, max_tokens=9)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None
    assert ended.usage.completion_tokens == 4
    words = simulated_text("x", 1, 8).split()
    stopped = client.completions.create(model="simulated", prompt="x", seed=1, max_tokens=9, stop=f"{words[2][2:]} ")
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == f" {words[0]} {words[1]} {words[2][:2]}"


def test_choices_are_numbered_by_prompt_and_then_by_copy(client: openai.OpenAI, http: httpx2.Client) -> None:
    completion = client.completions.create(
        model="simulated", prompt=["a", "b c"], n=2, best_of=2, echo=True, seed=5, max_tokens=3
    )
    expected = [
        prompt + simulated_text(prompt, child_seed(5, index), 3)
        for index, prompt in enumerate(["a", "a", "b c", "b c"])
    ]
    assert [choice.text for choice in completion.choices] == expected
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 12)
    group = http.get(f"/jobs/{completion.id}").json()
    assert len(group["children"]) == 4
    assert group["status"] == "succeeded"


def test_a_stream_has_one_id_and_its_parts_are_the_whole_text(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="simulated", prompt="x", seed=2, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *parts, last, usage = chunks
    assert [part.choices[0].text for part in parts] == [f" {word}" for word in simulated_text("x", 2, 5).split()]
    assert {part.choices[0].finish_reason for part in parts} == {None}
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens, usage.usage.total_tokens) == (1, 5, 6)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_asynchronous_client_gets_the_same(simulated_api: ApiServer) -> None:
    async with async_client(simulated_api) as client:
        whole = await client.completions.create(model="simulated", prompt="x", seed=2, max_tokens=5)
        stream = await client.completions.create(model="simulated", prompt="x", seed=2, max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


def test_a_stream_of_several_choices_echoes_each_prompt_first(http: httpx2.Client) -> None:
    body = {"prompt": ["a", "b"], "seed": 5, "max_tokens": 3, "echo": True, "stream": True}
    chunks = chunks_of(http.post("/v1/completions", json=body))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:2]] == ["a", "b"]
    for index, prompt in enumerate(["a", "b"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt + simulated_text(prompt, child_seed(5, index), 3)
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * 4
        assert mine[-1]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stream_is_taken_up_again_at_its_job(http: httpx2.Client) -> None:
    body = {"prompt": "x", "seed": 2, "max_tokens": 6, "stream": True}
    response = http.post("/v1/completions", json=body)
    id = response.headers["x-carpool-job-id"]
    events = raw_events(response)
    assert [event_id for event_id, _ in events] == ["1", "2", "3", "4", "5", "6", "6.end", ""]
    assert json.loads(events[0][1])["id"] == id
    with http.stream("GET", f"/jobs/{id}/stream", headers={"Last-Event-ID": events[2][0]}) as rest:
        tokens = [str(event.data["token"]) for event in tokens_of(rest) if event.data]
    had = "".join(json.loads(data)["choices"][0]["text"] for _, data in events[:3])
    assert had + "".join(tokens) == simulated_text("x", 2, 6)


def lp(text: bytes, logprob: float, *others: tuple[bytes, float]) -> TokenLogprob:
    """A token's logprobs as a worker writes them."""
    top = [TokenLogprob(id=index, lp=value, b=list(other)) for index, (other, value) in enumerate(others)]
    return TokenLogprob(id=9, lp=logprob, b=list(text), top=top)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_legacy_shape(settings: Settings, owner: ScriptedOwner, stream: bool) -> None:
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 4, "stream": stream}
    with running_api(settings) as api, api.client() as http, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: http.post("/v1/completions", json=body))
        ride = owner.claim()
        assert json.loads(str(owner.client.hget(keys.record(ride.id), "params")))["logprobs"] == 1
        car = "🚗".encode()
        # a token that was drawn though another was likelier, and a character in two tokens
        owner.write(ride, " a", lp=[lp(b" a", -2.0, (b" b", -0.5))])
        owner.write(ride, "", "🚗", lp=[lp(car[:2], -0.1, (car[:2], -0.1)), lp(car[2:], -9999.0, (b"c", -0.25))])
        owner.write(ride, "!", lp=[lp(b"!", 0.0, (b"!", 0.0))])
        owner.finish(ride)
        response = answer.result(10)
    choices = [chunk["choices"][0] for chunk in chunks_of(response)] if stream else response.json()["choices"]
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            merged[name] += values
    assert merged == {
        "tokens": [" a", "\ufffd", "\ufffd\ufffd", "!"],
        "token_logprobs": [-2.0, -0.1, -9999.0, 0.0],
        "top_logprobs": [{" b": -0.5, " a": -2.0}, {"\ufffd": -0.1}, {"c": -0.25, "\ufffd\ufffd": -9999.0}, {"!": 0.0}],
        "text_offset": [0, 2, 2, 3],
    }
    assert "".join(choice["text"] for choice in choices) == " a🚗!"


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("prompt", [1, 2], "prompt", "token ids are not supported"),
        ("prompt", [[1, 2]], "prompt", "token ids are not supported"),
        ("prompt", [], "prompt", "empty list"),
        ("prompt", "", "prompt", "''"),
        ("prompt", ["a", ""], "prompt[1]", "''"),
        ("suffix", "end", "suffix", "not supported"),
        ("best_of", 3, "best_of", "3"),
        ("n", 17, "n", "17"),
        ("n", 0, "n", "0"),
        ("logprobs", 21, "logprobs", "21"),
        ("max_tokens", 0, "max_tokens", "0"),
        ("temperature", 2.5, "temperature", "2.5"),
        ("stop", ["a"] * 5, "stop", "at most 4"),
        ("logit_bias", {"x": 1}, "logit_bias", "'x'"),
        ("stream_options", {"include_usage": True}, "stream_options", "stream"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools", "not supported"),
        ("max_completion_tokens", 5, "max_completion_tokens", "not supported"),
        ("metadata", {"a": 1}, "metadata.a", "1"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(
    client: openai.OpenAI, field: str, value: object, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/completions", body={"prompt": "x", field: value}, cast_to=object)
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"
    assert words in refusal.value.message


def test_logprobs_of_an_echoed_prompt_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="simulated", prompt="x", echo=True, logprobs=1)
    assert refusal.value.param == "echo"


def test_a_null_is_a_field_that_was_not_given(http: httpx2.Client) -> None:
    fields = ["suffix", "temperature", "n", "stop", "stream", "stream_options", "logprobs", "best_of", "user"]
    response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **dict.fromkeys(fields)})
    assert response.status_code == 200, response.text


def test_more_answers_than_one_request_may_have_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 256"):
        client.completions.create(model="simulated", prompt=["x"] * 17, n=16)
    with pytest.raises(openai.BadRequestError, match="at most 16") as refusal:
        client.completions.create(model="simulated", prompt=["x"] * 17, stream=True)
    assert refusal.value.code == "group_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_refused_before_it_is_accepted(
    client: openai.OpenAI, http: httpx2.Client, stream: bool
) -> None:
    newest = http.get("/jobs?limit=1").json()["data"]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="simulated", prompt=["x", "word " * 8200], stream=stream)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt[1]")
    assert "8200" in refusal.value.message
    assert "8192" in refusal.value.message
    with pytest.raises(openai.BadRequestError) as too_many:
        client.completions.create(model="simulated", prompt="x", max_tokens=8192, stream=stream)
    assert (too_many.value.code, too_many.value.param) == ("context_length_exceeded", "max_tokens")
    assert http.get("/jobs?limit=1").json()["data"] == newest
