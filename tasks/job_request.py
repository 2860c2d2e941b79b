"""What a job asks for, checked: shared by the API (every POST) and by the worker (tasks sent with plain Celery)."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from tasks.chat import Message
from tasks.priority import Priority
from tasks.structured import check_response_format, check_tool_choice, check_tools, chosen_tool

#: Largest seed that every JSON reader keeps exact.
MAX_DRAWN_SEED = 2**53 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_METADATA_BYTES = 16 * 1024
#: Most alternatives whose logprobs a token comes with.
MAX_LOGPROBS = 20
_MAX_TOKEN_ID_DIGITS = 10


class SamplingParams(BaseModel):
    """How tokens are drawn, by their OpenAI names. `temperature` 0 is greedy.

    `max_tokens` None means: as many as the endpoint's default and the context allow. `logprobs` None means: none are
    wanted; a number is how many alternatives each token's comes with. A `response_format` of type text is None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: StrictInt | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="New tokens at most. Not given: the endpoint's default, clamped to what the context leaves. "
        "One that does not fit beside the prompt is refused.",
    )
    temperature: float = Field(
        1.0, ge=0, le=2, allow_inf_nan=False, description="Divides the logits; 0 takes the likeliest token."
    )
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="The likeliest tokens up to this mass.")
    top_k: StrictInt = Field(0, ge=-1, description="How many of the likeliest tokens; 0 or -1: all.")
    min_p: float = Field(
        0.0, ge=0, le=1, allow_inf_nan=False, description="Tokens at least this part as likely as the likeliest."
    )
    stop: list[str] = Field(
        default_factory=list,
        description="A text, or up to 4 of at most 256 characters each, that end the answer and are no part of it.",
    )
    seed: StrictInt | None = Field(
        None, ge=-(2**63), le=2**64 - 1, description="Seed of the draws; one is drawn, and shown, where none is given."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, allow_inf_nan=False, description="Above 1: tokens of prompt and output become less likely."
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="Taken once from the logits of tokens that the output has."
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="Taken from a token's logit for each time that the output has it.",
    )
    logit_bias: dict[str, float] = Field(
        default_factory=dict, description="Token ids, as texts, and what is added to their logits: from -100 to 100."
    )
    logprobs: StrictInt | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Alternatives of each token whose logprobs are told; null: no logprobs.",
    )
    response_format: Annotated[dict[str, Any] | None, AfterValidator(check_response_format)] = Field(
        None,
        description="Of type `text`, `json_object`, or `json_schema` with a schema: the text cannot leave the form.",
    )
    tools: Annotated[list[dict[str, Any]] | None, AfterValidator(check_tools)] = Field(
        None, description="OpenAI's function tools, at most 128; with `messages` alone."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`auto`, `none`, `required`, or one function by its name."
    )
    parallel_tool_calls: StrictBool | None = Field(None, description="False: one call at most.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several_stops(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_within_bounds(cls, value: list[str]) -> list[str]:
        if len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} stop strings, at most {MAX_STOPS} are possible")
        for stop in value:
            if not stop:
                raise ValueError("a stop string must not be empty")
            if len(stop) > MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop string of {len(stop)} characters, at most {MAX_STOP_CHARACTERS} are possible")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases_within_bounds(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not token.isdecimal() or len(token) > _MAX_TOKEN_ID_DIGITS:
                raise ValueError(f"{token[:80]!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"a bias of {bias:g} for token {token}, from -100 to 100 is possible")
        return value

    @model_validator(mode="after")
    def _tools_fit_together(self) -> Self:
        check_tool_choice(self.tool_choice, self.tools)
        if self.parallel_tool_calls is not None and self.tools is None:
            raise ValueError("parallel_tool_calls without tools: give both or none")
        return self

    @property
    def offers_tools(self) -> bool:
        """Whether the model is shown the tools, may call them, and its text is to be read for calls."""
        return self.tools is not None and self.tool_choice != "none"

    @property
    def must_call_tools(self) -> bool:
        """Whether the text has to be calls of tools, and nothing else."""
        return self.tools is not None and (self.tool_choice == "required" or isinstance(self.tool_choice, dict))

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called: all that are offered, or the one that was chosen."""
        if self.tools is None or not self.offers_tools:
            return []
        name = chosen_tool(self.tool_choice)
        return [tool for tool in self.tools if name is None or tool["function"]["name"] == name]


Prompt = Annotated[str, Field(min_length=1)]


class JobOptions(SamplingParams):
    """What every request that makes jobs may say, beside what is to be generated."""

    model: str | None = Field(
        None, min_length=1, max_length=256, description="Name or alias of a served model; not given: the default one."
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=7 * 86400,
        allow_inf_nan=False,
        description="Seconds from now on after which the job ends as expired; not given: CARPOOL_DEADLINE_S.",
    )
    metadata: dict[str, Any] | None = Field(None, description="Yours: kept with the job, and shown; at most 16 KiB.")
    user: str | None = Field(None, max_length=256, description="Recorded without effect.")
    priority: Priority | None = Field(
        None, description="high, normal, low, or a number from 0 (first) to 9; null: normal."
    )

    @field_validator("metadata")
    @classmethod
    def _metadata_within_bounds(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) if value else 0
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"metadata of {size} bytes, at most {MAX_METADATA_BYTES} are possible")
        return value

    def sampling(self) -> SamplingParams:
        """The sampling parameters alone."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.model_fields})


class JobRequest(JobOptions):
    """The body of `POST /jobs`, and the keyword arguments of a task sent with plain Celery."""

    prompt: Prompt | None = Field(None, description="A text to go on with; or give `messages`.")
    messages: list[Message] | None = Field(
        None, min_length=1, description="A conversation to go on with, put into the model's chat template."
    )

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools with a prompt: give messages, since a chat template shows the tools to the model")
        return self


def draw_seed() -> int:
    """A seed for a job that names none."""
    return secrets.randbelow(MAX_DRAWN_SEED + 1)


def child_seed(seed: int, index: int) -> int:
    """Seed of child `index` of a group: BLAKE2b over "carpool-child-1:<seed>:<index>", 53 bits. Fixed for ever."""
    digest = hashlib.blake2b(f"carpool-child-1:{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_DRAWN_SEED
