"""Shapes of the answers under `/v1`, as `/docs` shows them. They are OpenAI's; what Carpool never sends is left out."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from api.schemas import ErrorAnswer, PromptTokensDetails

#: The errors of every endpoint here; a field that does not fit is 400, not 422 as on our own endpoints.
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "A field has a value that is not possible, is not supported, or is longer than the model's context."),
        (401, "An API key is needed, or this one is good no more."),
        (403, "A page of another site may not upload files, or the API key may not ask for this priority."),
        (404, "There is no such model, response, file or batch, or not for this API key."),
        (409, "The job or batch has not ended, or was cancelled, or the Idempotency-Key was used with another body."),
        (413, "The body or file is larger than it may be, or there is no room left for files."),
        (415, "The body is not JSON; that of an upload is no form."),
        (429, "The API key has used up its minute, or more of its jobs or tokens wait or run than may."),
        (500, "The job failed."),
        (503, "Redis or a worker is away, or Redis or the queue is full."),
        (504, "The job goes on and the wait was too long, or its deadline passed."),
    )
}
EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}


class ModelCard(BaseModel):
    """A model: `root` is the name it is served under, of which `id` may be an alias."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class CompletionUsage(BaseModel):
    """Tokens, those of a prompt with several choices counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = Field(None, description="Absent where no cache had any.")


class LegacyLogprobs(BaseModel):
    """One item per generated token, in four lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """The answer of `/v1/completions`; its id is the job's."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class TopLogprob(BaseModel):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was drawn, and those that were likeliest."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One item per generated token."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """What is to be called; `arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`; its id is the job's."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ResponseError(BaseModel):
    """Why a response failed. OpenAI's clients know few codes, so the message begins with Carpool's own."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(BaseModel):
    """A response; its id is the job's. `output` holds messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    metadata: dict[str, str]
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(BaseModel):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class FileObject(BaseModel):
    """A file: an upload, or what a batch has written. Times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(BaseModel):
    """What is wrong with a line of the input; the whole file where `line` is null."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(BaseModel):
    """Requests of a batch: in all, answered into the output, answered into the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch. Its files are there as soon as they hold a line. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of batches, newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
