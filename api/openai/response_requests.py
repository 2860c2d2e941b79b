"""The body of `POST /v1/responses`, and how its input becomes the turns of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, Tag, ValidationInfo, field_validator

from api.openai.requests import OpenAIRequest, without_nulls
from api.schemas import WebhookUrl, hides, refuse
from tasks.chat import FunctionCall, Message, ToolCall
from tasks.job_request import JobOptions, Prompt
from tasks.structured import check_response_format

_FORBID: Final = ConfigDict(extra="forbid", frozen=True)
_OF_OUTPUT: Final = "A part that this server sent may come back as it is."


class _Item(BaseModel):
    """What an item that this server sent brings along when it comes back."""

    model_config = _FORBID

    id: str | None = Field(None, description=_OF_OUTPUT)
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description=_OF_OUTPUT)

    @field_validator("*", mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return [without_nulls(item) for item in value] if isinstance(value, list) else value


class InputText(BaseModel):
    """A part of a message: text."""

    model_config = _FORBID

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0, description=_OF_OUTPUT)
    logprobs: list[Any] = Field([], max_length=0, description=_OF_OUTPUT)


class InputMessage(_Item):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class InputCall(_Item):
    """A call of a tool that the model made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class InputCallOutput(_Item):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: str | list[InputText]


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseText(BaseModel):
    """The form of the text: `format` is text, json_object or json_schema with its fields beside the type."""

    model_config = _FORBID

    format: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _is_possible(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_response_format(_chat_format(value))
        return value


class ResponseStreamOptions(BaseModel):
    """What a stream holds beside the answer."""

    model_config = _FORBID

    include_obfuscation: Literal[False] = False


class ResponseRequest(OpenAIRequest):
    """A conversation to go on with; the answer can be asked for again by its id."""

    model_config = hides("max_tokens", "response_format", "logprobs")

    input: Prompt | list[InputItem] = Field(
        description="A text, or the turns so far.", examples=["Tell me of the sea."]
    )
    instructions: str | None = Field(None, description="A system message for this answer alone.")
    max_output_tokens: StrictInt | None = Field(
        None, ge=1, le=2**31 - 1, description="New tokens at most; not given: what the context leaves."
    )
    previous_response_id: str | None = Field(None, max_length=128, description="The turn that this one follows.")
    background: bool = Field(False, description="Answer at once, and generate meanwhile.")
    webhook_url: WebhookUrl | None = None
    text: ResponseText | None = Field(None, description="The form of the answer.")
    truncation: Literal["disabled"] = Field("disabled", description="A prompt is never cut.")
    include: list[str] = Field([], max_length=0, description="Nothing more can be asked for.")
    stream_options: ResponseStreamOptions | None = Field(None, description="With `stream` alone.")

    _other_names = field_validator("max_tokens", "response_format", "logprobs", mode="before")(refuse)

    @field_validator("webhook_url")
    @classmethod
    def _is_for_the_background(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("background"):
            raise ValueError("it is for answers that nobody waits for: set background to true, or leave it out")
        return value

    @field_validator("input", mode="before")
    @classmethod
    def _null_in_an_item_is_absent(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("an empty list has nothing to answer: give a text, or items")
        return [without_nulls(item) for item in value] if isinstance(value, list) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_as_in_a_chat(cls, value: Any) -> Any:
        return [_chat_function(item) for item in value] if isinstance(value, list) else value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice_as_in_a_chat(cls, value: Any) -> Any:
        return _chat_function(value)

    def response_options(self) -> JobOptions:
        """The options of the job."""
        return self.options(
            max_tokens=self.max_output_tokens,
            response_format=_chat_format(self.text.format if self.text else None),
        )

    def turns(self) -> list[Message]:
        """The input as turns of a chat, without the instructions."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return as_turns(self.input)

    def echo(self) -> dict[str, Any]:
        """What the response object repeats of its request."""
        return {
            "background": self.background,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": (self.text.format if self.text else None) or {"type": "text"}},
            "tool_choice": _flat(self.tool_choice) or "auto",
            "tools": [_flat(tool) for tool in self.tools or ()],
            "top_p": self.top_p,
            "truncation": self.truncation,
            "user": self.user,
        }


def as_turns(items: Iterable[InputMessage | InputCall | InputCallOutput]) -> list[Message]:
    """Items as turns of a chat: calls in a row, and a text right before them, are one turn of the assistant."""
    turns: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            turns.append(Message(role=item.role, content=_text(item.content)))
        elif isinstance(item, InputCallOutput):
            turns.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        else:
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            before = turns.pop() if turns and turns[-1].role == "assistant" else None
            calls = [*((before.tool_calls or ()) if before else ()), call]
            turns.append(Message(role="assistant", content=before.content if before else None, tool_calls=calls))
    return turns


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _chat_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") != "json_schema":
        return value
    inner = {name: item for name, item in value.items() if name != "type" and item is not None}
    return {"type": "json_schema", "json_schema": inner}


def _chat_function(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": without_nulls({name: value[name] for name in value if name != "type"})}


def _flat(value: Any) -> Any:
    return {"type": value["type"], **value["function"]} if isinstance(value, dict) else value
