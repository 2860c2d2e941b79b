"""From a checked request to what the ledger accepts: shared by the API and by tasks sent with plain Celery."""

from __future__ import annotations

import json

from tasks.job_request import JobRequest, SamplingParams, draw_seed
from tasks.ledger_types import Acceptance, Job
from tasks.settings import Settings

#: New tokens of a job that does not say how many.
JOB_MAX_TOKENS = 256


def input_json(prompt: str | None, messages: list[tuple[str, str]] | None) -> str:
    """What a job is to continue, as the record keeps it."""
    return json.dumps({"prompt": prompt} if messages is None else {"messages": messages}, ensure_ascii=False)


def params_json(params: SamplingParams, max_tokens: int) -> str:
    """Sampling parameters as the record keeps them: complete, but for the seed, which stands apart."""
    return params.model_copy(update={"max_tokens": max_tokens, "seed": None}).model_dump_json()


def job_acceptance(id: str, pool: str, request: JobRequest, settings: Settings, native: bool = False) -> Acceptance:
    """One job as the ledger accepts it, with `POST /jobs`' defaults."""
    messages: list[tuple[str, str]] | None = (
        None if request.messages is None else [(turn.role, turn.text) for turn in request.messages]
    )
    max_tokens = request.max_tokens or min(JOB_MAX_TOKENS, settings.max_tokens)
    return Acceptance(
        id=id,
        pool=pool,
        params=params_json(request.sampling(), max_tokens),
        jobs=[Job(request.seed if request.seed is not None else draw_seed(), input_json(request.prompt, messages))],
        deadline_s=request.deadline_s or settings.deadline_s,
        tokens_are_default=request.max_tokens is None,
        metadata=json.dumps(request.metadata, ensure_ascii=False) if request.metadata else "",
        native=native,
    )
