"""What goes into the ledger's calls and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import entries, keys
from tasks.priority import NORMAL


@dataclass(frozen=True, slots=True)
class Job:
    """One job to be accepted. `input` is `{"prompt": …}` or `{"messages": …}` as JSON.

    `prompt_tokens`: those of the input, counted or estimated: what the job weighs on the queue, with max_tokens.
    """

    seed: int
    input: str
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What an API key may ask for; 0: as much as it likes."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    jobs_at_once: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit of an API key: of so many, within how long all of it is there again."""

    limit: int
    remaining: int
    reset_ms: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request has left of its key's minute; None where there is no limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Why a key may not.

    Attributes:
        what: requests or tokens (of the last minute), or jobs (at once).
        wait_ms: until it may; negative where so much can never be.
    """

    what: str
    limit: int
    used: int
    asked: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A request to accept one job, or a group of them (`is_group`; the children are `<id>.<i>`).

    Attributes:
        params: the sampling parameters as JSON, without the seed.
        max_tokens: theirs.
        tokens_are_default: max_tokens was not asked for, so the worker may clamp it to the context.
        deadline_s: from now.
        owner: whose the job is, in whose list it stands, and whose share of the slots it takes (an API key's id; "all"
            without keys).
        limits: of the owner's key; None: nothing is counted.
        counted_tokens: what each job counts as, until its end tells what it has used; only where tokens are limited.
        most_jobs, most_tokens: more of this owner may not wait with it; 0: no bound.
        user: the caller's own name for whoever asks; recorded without effect.
        request: what the endpoint needs to answer again in its own shape, as JSON; recorded without effect.
        priority: from 0, which comes first, to 9.
        batch: the batch that this is a line of, "" where it is none.
        trace: the trace that it is a part of (`tasks.trace_context`), "" where it is not traced.
        webhook: URL that is told of the end, "" where none is; of one job alone, not of a group or a line of a batch.
        idempotency, body_hash: hash of scope and key, hash of the canonical body; "" without a key.
    """

    id: str
    pool: str
    params: str
    jobs: Sequence[Job]
    deadline_s: float
    is_group: bool = False
    seed: int = 0
    tokens_are_default: bool = False
    metadata: str = ""
    owner: str = keys.NO_KEY
    limits: KeyLimits | None = None
    counted_tokens: Sequence[int] = ()
    user: str = ""
    request: str = ""
    idempotency: str = ""
    body_hash: str = ""
    native: bool = False
    priority: int = NORMAL
    batch: str = ""
    webhook: str = ""
    trace: str = ""
    max_tokens: int = 0
    most_jobs: int = 0
    most_tokens: int = 0

    def __post_init__(self) -> None:
        if self.webhook and (self.is_group or self.batch):
            raise ValueError("a webhook is of one job alone: not of a group, nor of a line of a batch")


@dataclass(frozen=True, slots=True)
class Invitation:
    """A job that was invited, by a Celery message in its pool's queue."""

    id: str
    pool: str


@dataclass(frozen=True, slots=True)
class QueueNumbers:
    """What waits, lines of batches apart: in all, and of the owner who asks.

    Attributes:
        tokens, own_tokens: prompts' tokens and max_tokens together.
        room_ms: time until there is room for what was refused; None where it is not known.
        drain_ms, own_drain_ms: time until nothing waits, and nothing of the owner's, in whichever pools; the same.
        eta_ms: of a job that is late or too long, the time until it would be done.
    """

    jobs: int
    tokens: int
    own_jobs: int
    own_tokens: int
    room_ms: int | None
    drain_ms: int | None
    own_drain_ms: int | None
    eta_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """ok: new. again: this id or idempotency key is known, `id` is its job. conflict: known with another body.

    tomb: a task of that id was sent with plain Celery, has ended, and its record is gone. `invitations` were sent.
    Refused, and nothing written: own_full_jobs, own_full_tokens, full_jobs, full_tokens (a cap of the owner or of all),
    never_fits_jobs, never_fits_tokens (a cap is less than this request alone), late (not done by its deadline),
    too_long (not even if nothing else waited), limited (its key may not, as `over` says).
    `queue`: what waits now, with the job where it is ok; `spent`: what is left of the key's minute. Both None where
    nothing was decided anew, and `spent` where nothing is counted or the queue refused first.
    """

    verdict: str
    id: str
    invitations: tuple[Invitation, ...] = ()
    queue: QueueNumbers | None = None
    spent: Spent | None = None
    over: OverLimit | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim. `verdict`: ok, gone, ended, taken, mismatch (other model), newer (other release).

    The rest is set for ok: the epoch of this ride, tokens in the log, deaths so far, a stop that is wanted ("" or a
    final status), the deadline in ms, what to generate, whether it has boarded, and the version of its
    record, in which its log is written. And what is told of it: when it was accepted, its trace ("" where it is not
    traced), and what has happened to it, with this claim (`tasks.life`).
    """

    verdict: str
    epoch: int = 0
    k: int = 0
    strikes: int = 0
    struck_at: int = -1
    stop: str = ""
    deadline_ms: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    input: dict[str, Any] = field(default_factory=dict)
    tokens_are_default: bool = False
    boarded: bool = False
    version: int = entries.VERSION
    created_at_ms: int = 0
    trace: str = ""
    life: str = ""


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """What one decoding step writes for one slot. Without ids it renews, with a `final` status it ends the job.

    Attributes:
        first: index of the first of `ids` (or of the next token): must be the ledger's k + 1.
        board: the sequence is about to be given to the child.
        texts: one per id.
        lp: logprobs, one item per id, or none at all.
        final: "" or succeeded, failed, cancelled, expired; only with every token in.
        tail: text that was still held back.
        error: the error as JSON where `final` is failed.
        version: of the job's record.
    """

    id: str
    epoch: int
    nonce: str
    first: int
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    lp: tuple[entries.TokenLogprob, ...] = ()
    board: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    final: str = ""
    finish_reason: str = ""
    tail: str = ""
    error: str = ""
    version: int = entries.VERSION

    def arguments(self) -> tuple[str | int, ...]:
        last = self.first + len(self.ids) - 1
        data = entries.encode_tokens(last, self.ids, self.texts, self.lp, version=self.version) if self.ids else ""
        return (
            self.id,
            self.epoch,
            self.nonce,
            "1" if self.board else "",
            "" if self.prompt_tokens is None else f"{self.prompt_tokens} {self.cached_tokens}",
            self.first,
            len(self.ids),
            data,
            "".join(self.texts),
            self.final,
            self.finish_reason,
            self.tail,
            self.error,
        )


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """ok; at (the ledger holds `k`: send again from there); ended (under this owner); fenced (not ours); error.

    `stop` is a final status that is wanted, "" where none is; for ended the status of the job, for error its text.
    """

    verdict: str
    k: int
    stop: str


@dataclass(frozen=True, slots=True)
class Rider:
    """Who asks: a job, and the epoch and nonce of the claim under which it rides."""

    id: str
    epoch: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """What became of a rider whose process died: back (it may board again), ended or fenced; its strikes, and where."""

    verdict: str
    strikes: int
    struck_at: int


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job or a group stands, for one who waits. A group has a status alone; it stays queued until it has ended.

    Attributes:
        k: tokens in the log.
        lease_ms: until the lease of a running job runs out; negative where it has.
        position: place in the queue from 1, 0 where it waits in none.
        has_worker: whether a worker of the pool of a queued job is ready.
        eta_ms: time until its end that can be expected, None where it is not known. As position and has_worker, it is
            looked up where that is asked for.
    """

    status: str
    k: int
    lease_ms: int
    position: int
    has_worker: bool
    eta_ms: int | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many due jobs were looked at (50 is the most of one call), and which were invited."""

    looked_at: int
    invitations: tuple[Invitation, ...]
