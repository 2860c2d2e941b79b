"""What a job may ask for: shapes that are refused before acceptance, and what a record keeps of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.acceptance import input_json, params_json
from tasks.chat import Message
from tasks.job_request import JobRequest, SamplingParams

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def schema_format(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, **changes}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "less than or equal to 20"),
    ({"logprobs": True}, "valid integer"),
    ({"logit_bias": {"9" * 5000: 1}}, "is no token id"),
    ({"response_format": {"type": "xml"}}, "'xml': give text, json_object or json_schema"),
    ({"response_format": {}}, "type 'None'"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "field 'schema', which is not supported"),
    ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
    ({"response_format": schema_format(name="a b")}, "json_schema.name is 'a b'"),
    ({"response_format": schema_format(schema=None)}, "json_schema.schema is no JSON Schema"),
    ({"response_format": schema_format(schema=nested(65))}, "nested deeper than 64"),
    ({"response_format": schema_format(schema={"title": "x" * 70_000})}, "at most 65536"),
    ({"response_format": schema_format(schema={"const": float("nan")})}, "not JSON compliant"),
    (
        {"response_format": schema_format(schema={"items": {"maxItems": 10**9}})},
        "maxItems of 1000000000, at most 10000",
    ),
    ({"response_format": schema_format(schema={"anyOf": [{"minItems": 1e5}]})}, "minItems of 100000.0"),
    ({"response_format": schema_format(strict="yes")}, "strict is 'yes'"),
    ({"tools": []}, "0 tools"),
    ({"tools": [TOOL] * 129}, "129 tools|two tools"),
    ({"tools": [TOOL, TOOL]}, "two tools have the name 'add'"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is no function tool"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
    ({"tools": [{"type": "function", "function": {"name": "a.b"}}]}, r"tools\[0\].function.name is 'a.b'"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "parameters is no JSON Schema"),
    ({"tools": [{"type": "function", "function": {"name": "a", "code": ""}}]}, "field 'code'"),
    ({"tool_choice": "auto"}, "tool_choice without tools"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls without tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "'any': give none, auto, required"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "no function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "names 'sub'.*tools add"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_parameter_of_a_wrong_shape_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingParams(**fields)


def test_a_text_format_is_no_format() -> None:
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()
    assert SamplingParams(response_format=schema_format(schema=nested(64))).response_format is not None


@pytest.mark.parametrize(
    ("choice", "offers", "must", "callable"),
    [
        (None, True, False, ["add", "sub"]),
        ("auto", True, False, ["add", "sub"]),
        ("required", True, True, ["add", "sub"]),
        ("none", False, False, []),
        ({"type": "function", "function": {"name": "sub"}}, True, True, ["sub"]),
    ],
)
def test_a_tool_choice_says_which_tools_may_and_must_be_called(
    choice: Any, offers: bool, must: bool, callable: list[str]
) -> None:
    params = SamplingParams(tools=[TOOL, {"type": "function", "function": {"name": "sub"}}], tool_choice=choice)

    assert (params.offers_tools, params.must_call_tools) == (offers, must)
    assert [tool["function"]["name"] for tool in params.callable_tools] == callable


def test_tools_are_for_chats() -> None:
    with pytest.raises(ValidationError, match="tools with a prompt: give messages"):
        JobRequest(prompt="Hello", tools=[TOOL])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "user"}, "has no content"),
        ({"role": "tool", "content": "4"}, "needs the tool_call_id"),
        ({"role": "user", "content": "a", "tool_call_id": "c1"}, "only a tool's message"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only an assistant's message"),
        ({"role": "assistant", "content": "a", "tool_calls": []}, "at least 1 item"),
    ],
)
def test_a_message_whose_fields_do_not_fit_its_role_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Message(**fields)


def test_a_record_keeps_a_plain_turn_as_a_pair_that_every_release_reads() -> None:
    turns = [
        Message(role="system", content="s"),
        Message.model_validate(
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ),
    ]

    assert json.loads(input_json(None, turns)) == {"messages": [["system", "s"], ["user", "ab"]]}


def test_a_turn_with_tools_comes_back_from_its_record_as_it_was() -> None:
    turns = [
        Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]}),
        Message(role="tool", content="4", tool_call_id="c1"),
        Message(role="assistant", content="It is 4."),
    ]
    records = json.loads(input_json(None, turns))["messages"]

    read = [Message.from_record(record) for record in records]

    assert [(turn.role, turn.text, turn.tool_calls, turn.tool_call_id) for turn in read] == [
        (turn.role, turn.text, turn.tool_calls, turn.tool_call_id) for turn in turns
    ]


def test_a_record_names_only_what_was_asked_for_and_keeps_a_schemas_nulls() -> None:
    plain = json.loads(params_json(SamplingParams(seed=3), 7))
    assert plain.keys().isdisjoint({"seed", "logprobs", "response_format", "tools", "tool_choice"})
    assert plain["max_tokens"] == 7

    params = SamplingParams(response_format=schema_format(schema={"enum": [None, 1], "default": None}), logprobs=0)
    assert SamplingParams(**json.loads(params_json(params, 7))) == params.model_copy(update={"max_tokens": 7})
