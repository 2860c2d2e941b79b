"""Bodies of requests and answers. What stands here is what `/docs` shows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from api.plain_json import PlainJson
from tasks.acceptance import JOB_MAX_TOKENS
from tasks.job_request import JobOptions, JobRequest, Prompt
from tasks.webhook_urls import parse_webhook_url

_PROMPT: Final = "A text to go on with."
_PROMPTS: Final = "Texts to go on with, each a job of a group."
_TEMPERATURE: Final = "Divides the logits; 0 takes the likeliest token."
_TOP_P: Final = "The likeliest tokens up to this mass."


def refuse(value: Any) -> Any:
    """A field that the base class has and this endpoint has not."""
    raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted")


def hides(*names: str) -> ConfigDict:
    """The configuration of a body that refuses inherited fields: they are not described either."""

    def hide(schema: dict[str, Any]) -> None:
        for name in names:
            schema.get("properties", {}).pop(name, None)

    return ConfigDict(json_schema_extra=hide)


def _webhook_url(value: str) -> str:
    parse_webhook_url(value)
    return value


#: Where the end of a job is told.
WebhookUrl = Annotated[
    str,
    AfterValidator(_webhook_url),
    Field(description="Is sent a signed POST when the job has ended.", examples=["https://example.com/hooks/carpool"]),
]


class PromptOptions(PlainJson, JobOptions):
    """What goes with a prompt: a chat template alone shows tools to a model."""

    model_config = hides("tools", "tool_choice", "parallel_tool_calls")

    _no_tools = field_validator("tools", "tool_choice", "parallel_tool_calls", mode="before")(refuse)


class TextOptions(PromptOptions):
    """What goes with an answer that is a text and nothing more."""

    model_config = hides("tools", "tool_choice", "parallel_tool_calls", "logprobs")

    _no_logprobs = field_validator("logprobs", mode="before")(refuse)


class BasicGenerate(TextOptions):
    """One prompt, one answer."""

    default_max_tokens: ClassVar[int] = 50

    prompt: Prompt = Field(description=_PROMPT, examples=["Hello, I am"])
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False, description=_TEMPERATURE)


class Generate(TextOptions):
    """Several prompts, answered in order."""

    default_max_tokens: ClassVar[int] = 50

    prompts: list[Prompt] = Field(
        min_length=1, max_length=256, description=_PROMPTS, examples=[["Hello, I am", "The sky is"]]
    )
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False, description=_TEMPERATURE)


class GenerateStream(PromptOptions):
    """One prompt, its tokens as they come."""

    default_max_tokens: ClassVar[int] = 20

    prompt: Prompt = Field(description=_PROMPT, examples=["Hello, I am"])
    temperature: float = Field(0.7, ge=0, le=2, allow_inf_nan=False, description=_TEMPERATURE)


class GenerateVllm(TextOptions):
    """Several prompts for a worker with the vLLM engine; an empty list is answered with an empty list."""

    default_max_tokens: ClassVar[int] = 20

    prompts: list[Prompt] = Field(max_length=256, description=_PROMPTS, examples=[["Hello, I am"]])
    temperature: float = Field(0.7, ge=0, le=2, allow_inf_nan=False, description=_TEMPERATURE)
    top_p: float = Field(0.95, gt=0, le=1, allow_inf_nan=False, description=_TOP_P)


class SubmitJob(PlainJson, JobRequest):
    """A job to be picked up later: give either prompt or messages."""

    default_max_tokens: ClassVar[int] = JOB_MAX_TOKENS

    webhook_url: WebhookUrl | None = None


class GeneratedText(BaseModel):
    """Prompt and completion."""

    generated_text: str = Field(description="Prompt and completion.")


class GeneratedTexts(BaseModel):
    """One text per prompt, in order."""

    generated_texts: list[str] = Field(
        description="In the order of the prompts; of `/generate_vllm` the completions alone."
    )


class ErrorDetail(BaseModel):
    """What went wrong, in plain words and as a code."""

    message: str = Field(description="Cause, value, and one thing to do.")
    type: str = Field(description="OpenAI's kind of error.")
    param: str | None = Field(description="Field of the request that is at fault.")
    code: str = Field(description="One of the table of codes.")


class ErrorAnswer(BaseModel):
    """Every error of every endpoint."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Tokens of a prompt that needed no prefill, since an earlier one began the same way."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a job; those of the prompt are known from its first ride on."""

    prompt_tokens: int | None = Field(description="Null until the job has boarded once.")
    completion_tokens: int = Field(description="An end-of-sequence token counts as one.")
    total_tokens: int | None = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails | None = Field(None, description="Absent where no cache had any.")


class JobUrls(BaseModel):
    """Where a job can be asked about."""

    self: str = Field(description="`GET` and `DELETE`.")
    stream: str = Field(description="`GET`: its events.")
    cancel: str = Field(description="`POST`.")


class WebhookAttempt(BaseModel):
    """One attempt to deliver: the status that the receiver answered with, or why there is none."""

    at: float = Field(description="When it began.")
    status_code: int | None = Field(description="What the receiver answered; null where it did not.")
    error: str | None = Field(description="Why there was no answer.")
    duration_ms: int = Field(description="Milliseconds that it took.")


class WebhookView(BaseModel):
    """A job's webhook and its last 50 attempts; a query is not shown, for it may hold a secret."""

    url: str = Field(description="Where it goes, without its query.")
    event_id: str = Field(description="`webhook-id`, the same at every attempt.")
    status: Literal["waiting", "pending", "delivered", "failed"] = Field(
        description="waiting: the job has not ended; pending: to be delivered, or tried again; failed: given up."
    )
    attempts: list[WebhookAttempt] = Field(description="The last 50, oldest first.")
    next_attempt_at: float | None = Field(description="When it is tried again.")


class JobEvent(BaseModel):
    """Something that happened to a job. What an event does not have is left out."""

    at: float
    event: Literal[
        "accepted",
        "invited",
        "claimed",
        "first_token",
        "model_process_died",
        "worker_lost",
        "handed_back",
        "cancel_requested",
        "omitted",
        "ended",
        "webhook_attempted",
    ]
    job: str
    tokens: int = Field(description="Tokens that it had then.")
    priority: int | None = None
    key: str | None = Field(None, description="accepted: name of the API key.")
    worker: str | None = Field(None, description="claimed, worker_lost: its name.")
    ride: int | None = Field(None, description="claimed: counts the workers that took it up, from 1.")
    waited_s: float | None = Field(None, description="claimed: for how long it had waited for a worker.")
    cause: str | None = Field(None, description="model_process_died: how, and while doing what.")
    status: str | None = Field(None, description="ended: as the job's.")
    finish_reason: str | None = None
    tokens_per_s: float | None = Field(None, description="ended: since the first token of the last ride.")
    status_code: int | None = Field(None, description="webhook_attempted: what the receiver answered.")
    error: str | None = None
    duration_ms: int | None = None


class JobView(BaseModel):
    """A job, or a group of jobs with `children` and `texts`. Times are seconds since 1970."""

    id: str = Field(description="Also Celery's task id.")
    object: Literal["job"]
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
    model: str = Field(description="Name that it is served under.")
    seed: int = Field(description="What was given or drawn.")
    created_at: float = Field(description="When it was accepted.")
    started_at: float | None = Field(description="When a worker first took it up.")
    finished_at: float | None = Field(description="When it ended.")
    deadline_at: float = Field(description="When it will end as expired.")
    priority: int = Field(description="From 0, which comes first, to 9.")
    queue_position: int | None = Field(description="Place from 1 while it waits.")
    eta_s: float | None = Field(description="Seconds until it is done; null where nobody can tell.")
    attempts: int = Field(description="Workers that took it up.")
    cancel_requested: bool = Field(description="Its worker was told to stop.")
    text: str | None = Field(description="The completion as far as it has come; null of a group.")
    texts: list[str] | None = Field(None, description="Of a group: one for each child.")
    children: list[str] | None = Field(None, description="Of a group: ids of its jobs.")
    finish_reason: str | None = Field(description="stop, length, error, cancelled or expired; null until the end.")
    usage: Usage
    error: ErrorDetail | None = Field(description="Why it failed or expired.")
    metadata: dict[str, Any] | None = Field(description="As it was given.")
    group: str | None = Field(description="Of a child: id of its group.")
    webhook: WebhookView | None = Field(description="Delivery log of its webhook.")
    urls: JobUrls
    durable: bool | None = Field(None, description="With CARPOOL_ACK_AFTER_FSYNC: whether the record is on disk.")
    events: list[JobEvent] | None = Field(None, description="With `include=events`: what happened to it, in order.")
    expires_at: float | None = Field(None, description="With `include=events`: until then it is kept.")


class JobPage(BaseModel):
    """Jobs, newest first."""

    object: Literal["list"]
    data: list[JobView]
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null at the end.")


class Health(BaseModel):
    """How this server or what it needs is."""

    status: str = Field(description="live, or accepting.")


class ModelState(BaseModel):
    """A model with its workers and its queue."""

    model: str = Field(description="Name that it is served under.")
    state: Literal["ready", "loading", "draining", "no worker"]
    workers: int = Field(description="That live.")
    slots: int = Field(description="Of workers that are not draining.")
    free: int = Field(description="Of workers that are ready.")
    waiting: int = Field(description="Jobs that wait for a slot.")


class Ready(BaseModel):
    """Whether jobs are run, and how each model is that has a worker or jobs that wait for one."""

    status: str
    models: list[ModelState]
