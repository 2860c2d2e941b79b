"""What a job asks for, checked: shared by the API (every POST) and by the worker (tasks sent with plain Celery)."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

#: Largest seed that every JSON reader keeps exact.
MAX_DRAWN_SEED = 2**53 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_METADATA_BYTES = 16 * 1024


class SamplingParams(BaseModel):
    """How tokens are drawn, by their OpenAI names. `temperature` 0 is greedy.

    `max_tokens` None means: as many as the endpoint's default and the context allow.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: StrictInt | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: StrictInt = Field(0, ge=-1, description="0 or -1: no limit")
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    stop: list[str] = Field(default_factory=list)
    seed: StrictInt | None = Field(None, ge=-(2**63), le=2**64 - 1)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] = Field(default_factory=dict)

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
            if not token.isdecimal():
                raise ValueError(f"{token!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"a bias of {bias:g} for token {token}, from -100 to 100 is possible")
        return value


class TextPart(BaseModel):
    """A part of a message: text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Prompt = Annotated[str, Field(min_length=1)]


class JobOptions(SamplingParams):
    """What every request that makes jobs may say, beside what is to be generated."""

    model: str | None = Field(None, min_length=1, max_length=256)
    deadline_s: float | None = Field(None, gt=0, le=7 * 86400, allow_inf_nan=False)
    metadata: dict[str, Any] | None = None
    user: str | None = Field(None, max_length=256)

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

    prompt: Prompt | None = None
    messages: list[Message] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


def draw_seed() -> int:
    """A seed for a job that names none."""
    return secrets.randbelow(MAX_DRAWN_SEED + 1)


def child_seed(seed: int, index: int) -> int:
    """Seed of child `index` of a group: BLAKE2b over "carpool-child-1:<seed>:<index>", 53 bits. Fixed for ever."""
    digest = hashlib.blake2b(f"carpool-child-1:{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_DRAWN_SEED
