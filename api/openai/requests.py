"""Bodies of the requests to `/v1/completions` and `/v1/chat/completions`, with OpenAI's names and bounds."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationInfo, field_validator, model_validator

from api.plain_json import PlainJson
from api.schemas import hides, refuse
from tasks.chat import Message
from tasks.job_request import MAX_LOGPROBS, JobOptions, Prompt

MAX_CHOICES: Final = 16
#: New tokens of a completion that does not say how many, as with OpenAI.
COMPLETION_MAX_TOKENS: Final = 16

Choices = Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES, description="Answers per prompt, each a job of a group.")]


def without_nulls(value: Any) -> Any:
    """A JSON object without its nulls: for OpenAI's clients a null is a field that was not given."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(BaseModel):
    """What a stream holds beside the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = Field(False, description="A last chunk without choices tells the usage.")
    include_obfuscation: Literal[False] = Field(False, description="Padding against traffic analysis: there is none.")


class OpenAIRequest(PlainJson, JobOptions):
    """What the endpoints have in common. Beyond OpenAI's there are Carpool's: top_k, min_p, deadline_s and so on."""

    metadata: dict[str, str] | None = Field(None, description="Yours: kept with the job, and shown; at most 16 KiB.")
    store: bool | None = Field(None, description="Recorded without effect: every job is kept for its retention.")
    stream: bool = Field(False, description="Answer with events, as the tokens come.")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return without_nulls(value)

    def options(self, **fields: Any) -> JobOptions:
        """The options of the job, `fields` in place of those that have another name or form here."""
        given = {name: getattr(self, name) for name in JobOptions.model_fields}
        return JobOptions(**{**given, **fields})


class ManyChoices(OpenAIRequest):
    """What those have in common that answer with choices."""

    n: Choices = 1
    stream_options: StreamOptions | None = Field(None, description="With `stream` alone.")

    @field_validator("stream_options")
    @classmethod
    def _are_for_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("they are for streams: set stream to true, or leave them out")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(ManyChoices):
    """A text to go on with, or several."""

    model_config = hides("tools", "tool_choice", "parallel_tool_calls")

    prompt: Prompt | list[Prompt] = Field(description="A text, or several.", examples=["Hello, I am"])
    best_of: StrictInt | None = Field(None, description="Not supported, but for the values that change nothing.")
    echo: bool = Field(False, description="Put the prompt before its completion.")

    _no_tools = field_validator("tools", "tool_choice", "parallel_tool_calls", mode="before")(refuse)

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, int) or (isinstance(first, list) and all(isinstance(item, int) for item in first)):
            raise ValueError("token ids are not supported: send the text")
        if value == []:
            raise ValueError("an empty list has nothing to go on with: send a text, or a list of texts")
        return value

    @field_validator("best_of")
    @classmethod
    def _chooses_nothing(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n", value)):
            raise ValueError("choosing the best of several answers is not supported, leave it out")
        return value

    @field_validator("echo")
    @classmethod
    def _without_logprobs(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("logprobs") is not None:
            raise ValueError("with logprobs it is not supported, for prompts have no logprobs: leave one of them out")
        return value

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)


class ChatRequest(ManyChoices):
    """A conversation to go on with."""

    messages: list[Message] = Field(
        min_length=1,
        description="The turns so far, put into the model's chat template.",
        examples=[[{"role": "user", "content": "Tell me of the sea."}]],
    )
    max_completion_tokens: StrictInt | None = Field(
        None, ge=1, le=2**31 - 1, description="OpenAI's newer name of `max_tokens`."
    )
    # their number stands in top_logprobs here
    logprobs: bool = Field(False, description="Tell the logprob of each token.")
    top_logprobs: StrictInt | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives of each token; with `logprobs` alone."
    )

    @field_validator("messages", mode="before")
    @classmethod
    def _null_in_a_message_is_absent(cls, value: Any) -> Any:
        # a client sends back the assistant's message as it got it, with nulls for all that it might hold
        return [without_nulls(item) for item in value] if isinstance(value, list) else value

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if None not in (value, other) and value != other:
            raise ValueError(f"it means the same as max_tokens, which is {other}: give one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: set logprobs to true, or leave it out")
        return value

    @property
    def tokens_field(self) -> str:
        """Which of the two names the request uses."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def chat_options(self) -> JobOptions:
        return self.options(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
