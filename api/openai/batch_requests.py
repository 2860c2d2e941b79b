"""The body of `POST /v1/batches`, and how long files may be kept."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from api.openai.requests import without_nulls
from api.plain_json import PlainJson

MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 30 * 86400


class OutputExpiry(BaseModel):
    """How long the output is kept from the end of the batch on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: StrictInt = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class CreateBatch(PlainJson):
    """A batch: which file, and which endpoint its requests are for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file_id: str = Field(
        min_length=1, max_length=128, description="Id of an uploaded file; each line is a request."
    )
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="What the `url` of every line is."
    )
    completion_window: Literal["24h"] = Field(description="Then it ends as expired.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Yours: kept with the batch.")
    output_expires_after: OutputExpiry | None = Field(
        None, description="How long its files are kept; not given: CARPOOL_FILE_RETENTION_S."
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return without_nulls(value)

    @field_validator("metadata")
    @classmethod
    def _metadata_within_bounds(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (value or {}).items():
            if len(name) > 64 or len(text) > 512:
                raise ValueError(f"keys have at most 64 and values 512 characters, which {name[:64]!r} exceeds")
        return value
