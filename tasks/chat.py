"""The turns of a chat: as a request gives them, and as a job's record keeps them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.tool_calls import render_call


class TextPart(BaseModel):
    """A part of a message: text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    """A function and its arguments, as the model wrote them: JSON text, mostly an object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool that an assistant's turn made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One turn of a chat.

    An assistant's turn has content, tool calls or both; a turn of role "tool" answers the call that `tool_call_id`
    names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = Field(None, min_length=1)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has tool_calls: only an assistant's message has them")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"a message of role {self.role} has a tool_call_id: only a tool's message has one")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs the tool_call_id of the call that it answers")
        if self.content is None and self.tool_calls is None:
            raise ValueError(f"a message of role {self.role} has no content: give a text")
        return self

    @property
    def text(self) -> str:
        """The content as one text; "" where there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def text_with_calls(self) -> str:
        """The content and the tool calls as one text, as a model writes them."""
        calls = [render_call(call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return "\n".join([*([self.text] if self.text else []), *calls])

    def as_record(self) -> list[str] | dict[str, Any]:
        """What the job's record holds: a pair of role and text, which every release reads, and an object for tools."""
        if self.role != "tool" and self.tool_calls is None:
            return [self.role, self.text]
        return self.model_dump(mode="json", exclude_none=True) | {"content": self.text}

    @classmethod
    def from_record(cls, record: list[str] | dict[str, Any]) -> Self:
        """The turn that `as_record` kept."""
        if isinstance(record, dict):
            return cls(**record)
        role, text = record
        return cls(role=role, content=text)  # checked when it was accepted
