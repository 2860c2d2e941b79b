"""From messages and tools to a prompt, by a model's chat template: the same in the Model worker and in the API.

The worker prompts with it; the API counts with it before a chat is accepted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Final

from tasks.chat import Message, ToolCall
from tasks.codes import CarpoolError
from tasks.tool_calls import OPEN, describe_tools, render_result

Turn = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's templates.

    Attributes:
        default: for messages; None where the model has none.
        for_tools: for messages with tools, where the model has one of its own for them.
        special_tokens: the names that templates know special tokens by, such as `bos_token`, and their texts.
    """

    default: str | None
    for_tools: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The prompt, with the assistant's turn opened.

        Raises:
            CarpoolError: "chat_template_missing", or "invalid_request" where the template refuses the messages.
        """
        template = self.for_tools if tools and self.for_tools is not None else self.default
        if template is None:
            raise CarpoolError(
                "chat_template_missing", "this model has no chat template: send a prompt instead of messages"
            )
        turns, shown_tools = conversation(messages, tools, template)
        try:
            return str(
                _jinja().render(
                    template, messages=turns, tools=shown_tools, add_generation_prompt=True, **self.special_tokens
                )
            )
        except ValueError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise CarpoolError(
                "invalid_request", f"the model's chat template refuses messages of {roles}: {error}", param="messages"
            ) from error

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ChatTemplate:
        """What `to_json` wrote; what a newer release wrote besides is passed over."""
        found = json.loads(text)
        return cls(found["default"], found.get("for_tools"), found.get("special_tokens") or {})


NO_CHAT_TEMPLATE: Final = ChatTemplate(None)


def _jinja() -> ModuleType:
    """Imported at the first chat: every process knows templates, and few render one."""
    return importlib.import_module("tasks.jinja_templates")


def knows_tools(template: str) -> bool:
    """Whether a template shows tools and calls to the model in our form of text.

    One that speaks of tools in another form (Llama's, Mistral's) would ask the model for what the grammar forbids, so
    it counts as one that knows none.
    """
    return OPEN in template and "tools" in _jinja().variables(template)


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
