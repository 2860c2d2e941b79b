"""Chats with tools, for templates that know them and for those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import GenerationConfig

from tasks.chat import Message
from tasks.chat_template import ChatTemplate, conversation, knows_tools
from tasks.codes import CarpoolError
from tests.tiny_models import CHAT_TEMPLATE, save_tokenizer
from worker.engines.base import SequenceError
from worker.engines.transformers_tokenizer import TransformersTokenizer

TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}},
}
#: As Qwen's, in short.
TOOLS_TEMPLATE: Final = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</system>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(*turns: dict[str, Any]) -> list[Message]:
    return [Message.model_validate(turn) for turn in turns]


def call(id: str, arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


QUESTION: Final = {"role": "user", "content": "1 + 1?"}
CALLS: Final = {"role": "assistant", "content": None, "tool_calls": [call("c1"), call("c2", '{"a": 2}')]}
RESULTS: Final = (
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
)


def tokenizer_of(folder: Path, template: str | dict[str, str]) -> TransformersTokenizer:
    fast = save_tokenizer(folder)
    fast.chat_template = template
    return TransformersTokenizer(fast, GenerationConfig())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TOOLS_TEMPLATE, True),
        (CHAT_TEMPLATE, False),
        ("{{ tools | tojson }} [TOOL_CALLS]", False),
        ("{% set tools = 1 %}<tool_call>", False),
        ("{% generation %}{{ tools }}<tool_call>{% endgeneration %}", True),
    ],
    ids=["ours", "none", "another form", "a name of its own", "a tag of transformers"],
)
def test_a_template_knows_tools_where_it_shows_them_in_our_form(template: str, expected: bool) -> None:
    assert knows_tools(template) is expected


def test_a_template_that_knows_tools_gets_tools_calls_and_results(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, TOOLS_TEMPLATE)

    prompt, ids = tokenizer.encode_chat(chat(QUESTION, CALLS, *RESULTS), [TOOL])

    assert json.loads(prompt.partition("<system>")[2].partition("</system>")[0]) == TOOL
    assert prompt.endswith(
        '<user>1 + 1?<assistant><tool_call>add {"a": 1}</tool_call><tool_call>add {"a": 2}</tool_call>'
        "<tool>one<tool>two<assistant>"
    )
    assert tokenizer.decode(ids) == prompt


def test_a_template_without_tools_gets_a_system_message_and_plain_turns(tmp_path: Path) -> None:
    prompt, _ = tokenizer_of(tmp_path, CHAT_TEMPLATE).encode_chat(chat(QUESTION, CALLS, *RESULTS), [TOOL])

    system, _, rest = prompt.removeprefix("<system>").partition("</system>")
    assert json.loads(system.partition("<tools>\n")[2].partition("\n</tools>")[0]) == TOOL
    assert rest == (
        "<user>1 + 1?</user><assistant>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call></assistant>'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response></user><assistant>"
    )


def test_the_tools_stand_behind_the_system_message_that_is_there() -> None:
    turns, shown = conversation(chat({"role": "system", "content": "Be brief."}, QUESTION), [TOOL], CHAT_TEMPLATE)

    assert shown is None
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert turns[0]["content"].startswith("Be brief.\n\nYou may call")


def test_a_chat_without_tools_is_as_it_was(tmp_path: Path) -> None:
    for template in (CHAT_TEMPLATE, TOOLS_TEMPLATE):
        turns, shown = conversation(chat(QUESTION, {"role": "assistant", "content": "2"}), [], template)
        assert turns == [QUESTION, {"role": "assistant", "content": "2"}]
        assert shown is None


def test_a_model_with_a_template_of_its_own_for_tools_shows_them_with_that_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"default": CHAT_TEMPLATE, "tool_use": "with tools " + TOOLS_TEMPLATE})

    assert tokenizer.encode_chat(chat(QUESTION), [TOOL])[0].startswith("with tools")
    assert tokenizer.encode_chat(chat(QUESTION))[0] == "<user>1 + 1?</user><assistant>"


def test_a_template_that_trips_over_a_turn_refuses_the_chat_and_nothing_more(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.tool_calls[0].function.arguments | items | list }}{% endfor %}"
    tokenizer = tokenizer_of(tmp_path, template + "{{ tools }}<tool_call>")
    turn = {"role": "assistant", "content": "so", "tool_calls": [call("c1", "[1]")]}

    with pytest.raises(SequenceError, match="refuses messages of assistant") as caught:
        tokenizer.encode_chat(chat(turn))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    "template",
    [
        TOOLS_TEMPLATE,
        CHAT_TEMPLATE,
        "{{ bos_token }}{% for message in messages %}\n  {%- if loop.first %}x{% continue %}{% endif %}\n"
        "  {% generation %}{{ message['content'] | trim }}{% endgeneration %}{{ eos_token }}\n{% endfor %}\n\n",
        "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    ],
    ids=["tools", "plain", "tags and white space", "globals and filters"],
)
def test_a_template_gives_what_transformers_makes_of_it(tmp_path: Path, template: str) -> None:
    fast = save_tokenizer(tmp_path)
    fast.chat_template = template
    messages = chat(QUESTION, {"role": "assistant", "content": " <b>2</b> ü "}, QUESTION)
    ours = TransformersTokenizer(fast, GenerationConfig()).chat_template  # type: ignore[no-untyped-call]
    theirs = fast.apply_chat_template(
        [message.model_dump(include={"role", "content"}) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours.render(messages) == theirs
    assert ChatTemplate.from_json(ours.to_json()) == ours


def test_a_template_is_kept_in_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(CarpoolError, match="refuses messages of user"):
        template.render(chat(QUESTION))


def test_arguments_that_were_cut_short_stay_the_text_that_they_are() -> None:
    (turn,), _ = conversation(
        chat({"role": "assistant", "content": "so", "tool_calls": [call("c1", '{"a": ')]}), [], TOOLS_TEMPLATE
    )

    assert turn["content"] == "so"
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": '}
