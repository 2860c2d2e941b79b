"""What goes into the ledger's calls for files and batches and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks import keys
from tasks.ledger_types import Acceptance


@dataclass(frozen=True, slots=True)
class NewFile:
    """An upload whose chunks are all there.

    Attributes:
        ttl_s: how long the file is kept from now on.
        owner: whose it is: an API key's id; "all" without keys.
        idempotency, body_hash: hash of scope and key, hash of purpose and bytes; "" without a key.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    num_chunks: int
    ttl_s: float
    owner: str = keys.NO_KEY
    idempotency: str = ""
    body_hash: str = ""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to be recorded.

    Attributes:
        job_prefix: what the ids of its jobs begin with; the number of the line follows.
        window_s: its time from now on.
        keep_s: how long it and its output are kept from its end on.
        metadata: as JSON, "" without any.
        owner: whose it is, and its jobs and files are.
    """

    id: str
    job_prefix: str
    file: str
    endpoint: str
    completion_window: str
    window_s: float
    keep_s: float
    metadata: str
    output: str
    errors_file: str
    owner: str = keys.NO_KEY
    idempotency: str = ""
    body_hash: str = ""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next line of a file begins: behind line number `line`, in this chunk, at this byte of it."""

    line: int = 0
    chunk: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class BatchState:
    """How a batch stands.

    Attributes:
        ending: what it is on its way to: "", cancelled, expired or failed.
        owner: whose it is: an API key's id; "all" without keys.
        at: where its next line begins.
        fed: every line was taken.
        room: so many jobs the queue has room for, None where it takes any number.
        open: number of each line whose answer is not written yet, and the status of its job ("gone" without a record).
    """

    status: str
    ending: str
    file: str
    endpoint: str
    job_prefix: str
    owner: str
    at: Position
    fed: bool
    room: int | None
    open: dict[int, str]

    def job(self, line: int) -> str:
        """Id of the job, or group, of a line."""
        return f"{self.job_prefix}{line}"

    @property
    def ended(self) -> bool:
        return self.status not in ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class FeedItem:
    """A line that was read: a job to be accepted, or the answer to one that can be none."""

    line: int
    acceptance: Acceptance | None = None
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line whose job has ended, as a line of the output or of the errors."""

    line: int
    kind: Literal["output", "errors"]
    text: str


@dataclass(frozen=True, slots=True)
class FeedPage:
    """Lines in a row.

    Attributes:
        after: number of the last line before them, as the cursor said.
        next: where the line behind them begins.
        done: there is none.
        errors: why the rest of the input cannot be read, as JSON, or "".
    """

    after: int
    next: Position
    items: Sequence[FeedItem]
    done: bool
    errors: str = ""
