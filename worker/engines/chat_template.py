"""Messages and tools as a chat template takes them, whether or not it knows tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta

from tasks.chat import Message, ToolCall
from tasks.tool_calls import OPEN, describe_tools, render_result

Turn = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


def knows_tools(template: str) -> bool:
    """Whether a template shows tools and calls to the model in our form of text.

    One that speaks of tools in another form (Llama's, Mistral's) would ask the model for what the grammar forbids, so
    it counts as one that knows none.
    """
    if OPEN not in template:
        return False
    try:
        return "tools" in meta.find_undeclared_variables(Environment(autoescape=False).parse(template))  # noqa: S701
    except TemplateError:  # a tag of transformers' own, such as {% generation %}
        return "tools" in template


def conversation(messages: Sequence[Message], tools: Tools, template: str) -> tuple[list[Turn], list[Any] | None]:
    """The turns and the tools for a template. Where it knows none, a system message and plain turns say the same."""
    if knows_tools(template):
        return [_native(message) for message in messages], list(tools) or None
    turns: list[Turn] = []
    for message in messages:
        _append(turns, _plain(message))
    if tools:
        told = describe_tools(tools)
        if turns and turns[0]["role"] in ("system", "developer"):
            turns[0]["content"] += f"\n\n{told}"
        else:
            turns.insert(0, {"role": "system", "content": told})
    return turns, None


def _native(message: Message) -> Turn:
    turn: Turn = {"role": message.role, "content": message.text}
    if message.tool_calls is not None:
        turn["tool_calls"] = [_native_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _native_call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves; what is no JSON (a call cut short) stays text."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _plain(message: Message) -> Turn:
    if message.role == "tool":
        return {"role": "user", "content": render_result(message.text)}
    return {"role": message.role, "content": message.text_with_calls}


def _append(turns: list[Turn], turn: Turn) -> None:
    """Results of several calls are one turn of the user: many templates want the roles to alternate."""
    is_result = turn["content"].startswith("<tool_response>")
    if is_result and turns and turns[-1]["role"] == "user" and turns[-1]["content"].startswith("<tool_response>"):
        turns[-1]["content"] += f"\n{turn['content']}"
    else:
        turns.append(turn)
