"""From a checked request to what the ledger accepts: shared by the API and by tasks sent with plain Celery."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tasks.chat import Message
from tasks.job_request import JobRequest, SamplingParams, draw_seed
from tasks.ledger_types import Acceptance, Job
from tasks.priority import priority_number
from tasks.settings import Settings

#: New tokens of a job that does not say how many.
JOB_MAX_TOKENS = 256


#: Bytes of a prompt that count as one token where nobody counts them.
BYTES_PER_TOKEN = 4


def estimated_input(prompt: str | None, messages: Sequence[Message] | None) -> int:
    """Tokens of a prompt, or of messages as JSON, that nobody counted: one for four bytes of UTF-8, rounded up."""
    text = input_json(None, messages) if prompt is None else prompt
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def input_json(prompt: str | None, messages: Sequence[Message] | None) -> str:
    """What a job is to continue, as the record keeps it."""
    given = {"prompt": prompt} if messages is None else {"messages": [message.as_record() for message in messages]}
    return json.dumps(given, ensure_ascii=False)


def params_json(params: SamplingParams, max_tokens: int) -> str:
    """Sampling parameters as the record keeps them, but for the seed, which stands apart.

    What is None is left out, so that a worker of the release before reads all records that ask for nothing new.
    """
    given = params.model_copy(update={"max_tokens": max_tokens, "seed": None})
    return given.model_dump_json(exclude={name for name in SamplingParams.model_fields if getattr(given, name) is None})


def job_acceptance(id: str, pool: str, request: JobRequest, settings: Settings, native: bool = False) -> Acceptance:
    """One job as the ledger accepts it, with `POST /jobs`' defaults."""
    max_tokens = request.max_tokens or min(JOB_MAX_TOKENS, settings.max_tokens)
    seed = draw_seed() if request.seed is None else request.seed
    return Acceptance(
        id=id,
        pool=pool,
        params=params_json(request.sampling(), max_tokens),
        jobs=[
            Job(seed, input_json(request.prompt, request.messages), estimated_input(request.prompt, request.messages))
        ],
        max_tokens=max_tokens,
        deadline_s=request.deadline_s or settings.deadline_s,
        tokens_are_default=request.max_tokens is None,
        metadata=json.dumps(request.metadata, ensure_ascii=False) if request.metadata else "",
        native=native,
        priority=priority_number(request.priority),
    )
