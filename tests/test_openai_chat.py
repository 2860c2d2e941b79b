"""`/v1/chat/completions` with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tasks import keys
from tasks.entries import TokenLogprob
from tasks.job_request import child_seed
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.openai_clients import async_client, chat_text, chunks_of, openai_client
from tests.scripted_owner import ScriptedOwner

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
]
CALLS = ['{"a": 1}', '{"a": "}<"}']


@pytest.fixture
def client(simulated_api: ApiServer) -> Iterator[openai.OpenAI]:
    with openai_client(simulated_api) as client:
        yield client


def test_an_answer_is_the_job_of_its_id(simulated_api: ApiServer, client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = client.chat.completions.create(
        model="gpt-4o-mini", messages=messages, seed=4, max_completion_tokens=6, store=True, metadata={"a": "b"}
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == chat_text([("developer", "Be brief."), ("user", "Hello")], 4, 6)
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("length", None, None)
    with simulated_api.client() as http:
        job = http.get(f"/jobs/{answer.id}").json()
    assert job["text"] == choice.message.content
    assert job["metadata"] == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == job["usage"]


def test_without_a_number_of_tokens_the_rest_of_the_context_is_there(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, api.client() as http, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: http.post("/v1/chat/completions", json={"messages": HELLO}))
        ride = owner.claim()
        params = json.loads(str(owner.client.hget(keys.record(ride.id), "params")))
        assert (params["max_tokens"], params["temperature"]) == (settings.max_tokens, 1.0)
        assert owner.client.hget(keys.record(ride.id), "default_tokens") == "1"
        owner.finish(ride)
        assert answer.result(10).status_code == 200


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="simulated",
            messages=HELLO,
            seed=2,
            max_tokens=4,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *parts, usage = chunks
    for index in range(2):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == chat_text([("user", "Hello")], child_seed(2, index), 4)
        assert [choice.finish_reason for choice in mine] == [None] * 5 + ["length"]
        assert mine[-1].delta.to_dict() == {}
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (3, 8)


async def test_the_asynchronous_client_streams(simulated_api: ApiServer) -> None:
    async with async_client(simulated_api) as client:
        stream = await client.chat.completions.create(
            model="simulated", messages=HELLO, seed=2, max_tokens=4, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == chat_text([("user", "Hello")], 2, 4)


def test_tokens_come_while_they_are_made(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        stream = client.chat.completions.create(model="simulated", messages=HELLO, stream=True)
        ride = owner.claim()
        assert next(stream).choices[0].delta.role == "assistant"
        for token in (" a", " b"):
            owner.write(ride, token)
            assert next(stream).choices[0].delta.content == token
        # text is held back: there is nothing to say
        owner.write(ride, "")
        owner.finish(ride, tail=" c", reason="stop")
        assert next(stream).choices[0].delta.content == " c"
        last = next(stream).choices[0]
        assert (last.delta.content, last.finish_reason) == (None, "stop")
        assert list(stream) == []


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_a_stream_cancels_its_jobs(settings: Settings, owner: ScriptedOwner, leaves: bool) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        stream = client.chat.completions.create(
            model="simulated", messages=HELLO, stream=True, extra_headers={} if leaves else {"Idempotency-Key": "k"}
        )
        ride = owner.claim()
        assert next(stream).id == ride.id
        stream.close()
        until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
        if leaves:
            until(lambda: owner.look(ride) == "cancelled")
        else:
            assert owner.look(ride) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_shape_of_a_chat(settings: Settings, owner: ScriptedOwner, stream: bool) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "stream": stream}
    top = TokenLogprob(id=1, lp=-0.5, b=[32, 98])
    with running_api(settings) as api, api.client() as http, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: http.post("/v1/chat/completions", json=body))
        ride = owner.claim()
        assert json.loads(str(owner.client.hget(keys.record(ride.id), "params")))["logprobs"] == 1
        owner.write(ride, " a", "", lp=[TokenLogprob(id=2, lp=-2.0, b=[32, 97], top=[top])] * 2)
        owner.finish(ride)
        response = answer.result(10)
    choices = [chunk["choices"][0] for chunk in chunks_of(response)] if stream else response.json()["choices"]
    content = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    likely = [{"token": " b", "logprob": -0.5, "bytes": [32, 98]}]
    assert content == [{"token": " a", "logprob": -2.0, "bytes": [32, 97], "top_logprobs": likely}] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_of_tools_are_told_from_text(settings: Settings, owner: ScriptedOwner, stream: bool, step: int) -> None:
    text = "Let me add." + "".join(
        f'\n<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>' for arguments in CALLS
    )
    with running_api(settings) as api, openai_client(api) as client, ThreadPoolExecutor(1) as threads:
        options: dict[str, Any] = {"model": "simulated", "messages": HELLO, "tools": TOOLS, "tool_choice": "auto"}
        answer = threads.submit(
            lambda: (
                list(client.chat.completions.create(**options, stream=True))
                if stream
                else client.chat.completions.create(**options)
            )
        )
        ride = owner.claim()
        for start in range(0, len(text), step):
            owner.write(ride, text[start : start + step])
        owner.finish(ride, reason="stop")
        found: Any = answer.result(20)
    calls: dict[int, dict[str, str]] = {}
    if stream:
        content = ""
        for chunk in found:
            content += chunk.choices[0].delta.content or ""
            for delta in chunk.choices[0].delta.tool_calls or ():
                call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
        reason = found[-1].choices[0].finish_reason
    else:
        content, reason = found.choices[0].message.content, found.choices[0].finish_reason
        for index, one in enumerate(found.choices[0].message.tool_calls):
            calls[index] = {"id": one.id, "name": one.function.name, "arguments": one.function.arguments}
    assert (content, reason) == ("Let me add.", "tool_calls")
    assert [call["arguments"] for call in calls.values()] == CALLS
    assert {call["name"] for call in calls.values()} == {"add"}
    assert len({call["id"] for call in calls.values()}) == 2


def test_the_turns_of_tools_go_to_the_model_as_the_client_got_them(settings: Settings, owner: ScriptedOwner) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    # the nulls that a client's model of our answer has
    turn = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call], "function_call": None}
    messages = [*HELLO, turn, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    with running_api(settings) as api, api.client() as http, ThreadPoolExecutor(1) as threads:
        body = {"messages": messages, "tools": TOOLS}
        answer = threads.submit(lambda: http.post("/v1/chat/completions", json=body))
        ride = owner.claim()
        given = json.loads(str(owner.client.hget(keys.record(ride.id), "input")))["messages"]
        owner.finish(ride)
        assert answer.result(10).status_code == 200
    assert given[1]["tool_calls"] == [call]
    assert given[2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("messages", [], "messages", "at least 1"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role", "robot"),
        ("messages", [{"role": "user"}], "messages[0]", "no content"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "image_url",
        ),
        ("top_logprobs", 2, "top_logprobs", "needs logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens", "0"),
        ("functions", [{"name": "f"}], "functions", "not supported"),
        ("audio", {"voice": "x"}, "audio", "not supported"),
        ("modalities", ["audio"], "modalities", "not supported"),
        ("best_of", 1, "best_of", "not supported"),
        ("response_format", {"type": "xml"}, "response_format", "xml"),
        ("tools", [{"type": "retrieval"}], "tools", "function"),
        ("prompt", "x", "prompt", "not supported"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(
    client: openai.OpenAI, field: str, value: object, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/chat/completions", body={"messages": HELLO, field: value}, cast_to=object)
    assert refusal.value.param == param
    assert words in refusal.value.message


def test_two_numbers_of_tokens_are_refused_unless_they_agree(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="simulated", messages=HELLO, max_tokens=2, max_completion_tokens=2)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="simulated", messages=HELLO, max_tokens=2, max_completion_tokens=3)
    assert refusal.value.param == "max_completion_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_too_long_is_refused_before_it_is_accepted(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 8200}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="simulated", messages=messages, stream=stream)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as too_many:
        client.chat.completions.create(model="simulated", messages=HELLO, max_completion_tokens=8192, stream=stream)
    assert (too_many.value.code, too_many.value.param) == ("context_length_exceeded", "max_completion_tokens")
    assert "8192" in too_many.value.message


def test_what_the_engine_does_not_do_is_refused_by_name_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="simulated", messages=HELLO, tools=TOOLS)
