"""Files and batches in the ledger, as its tests make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks import keys
from tasks.batch_types import Answer, FeedItem, FeedPage, NewBatch, NewFile, Position
from tasks.ledger_types import Job
from tests.ledger_harness import LedgerOnAClock, acceptance

BATCH = "batch_1"
INPUT = "file-in"
OUTPUT = "file-1-output"
ERRORS = "file-1-errors"


def job_of(line: int) -> str:
    return f"cmpl-1.{line}"


def make_file(ledger: LedgerOnAClock, id: str = INPUT, chunks: Sequence[bytes] = (b"a line\n",), **more: Any) -> str:
    """Upload a file; answers the verdict of its end."""
    for n, data in enumerate(chunks):
        assert ledger.run(ledger.batch_calls.append_chunk(id, n, data)) is None
    size = sum(map(len, chunks))
    fields = {"filename": "in.jsonl", "purpose": "batch", "ttl_s": 3600.0, **more}
    verdict, _ = ledger.run(
        ledger.batch_calls.finish_file(NewFile(id, num_bytes=size, num_chunks=len(chunks), **fields))
    )
    return verdict


def new_batch(**more: Any) -> NewBatch:
    base: dict[str, Any] = {
        "id": BATCH,
        "job_prefix": "cmpl-1.",
        "file": INPUT,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "window_s": 86400.0,
        "keep_s": 7200.0,
        "metadata": "",
        "output": OUTPUT,
        "errors_file": ERRORS,
    }
    return NewBatch(**{**base, **more})


def make_batch(ledger: LedgerOnAClock, num_requests: int = 3, **more: Any) -> None:
    """A batch that was validated."""
    make_file(ledger)
    assert ledger.run(ledger.batch_calls.create_batch(new_batch(**more))) == ("ok", BATCH)
    assert ledger.run(ledger.batch_calls.validated(BATCH, num_requests)) == "in_progress"


def job_item(line: int, **more: Any) -> FeedItem:
    return FeedItem(line, acceptance(job_of(line), **{"batch": BATCH, "priority": 9, **more}))


def group_item(line: int, n: int = 2) -> FeedItem:
    return job_item(line, jobs=[Job(i, '{"prompt": "x"}') for i in range(n)], is_group=True)


def refused_item(line: int) -> FeedItem:
    return FeedItem(line, answer=f"refused {line}\n")


def feed(ledger: LedgerOnAClock, after: int, items: Sequence[FeedItem], *, done: bool = False) -> str:
    """Take lines behind line `after`."""
    last = items[-1].line if items else after
    page = FeedPage(after, Position(last, 0, last * 10), items, done)
    return ledger.run(ledger.batch_calls.feed(BATCH, page))


def feed_jobs(ledger: LedgerOnAClock, n: int, *, done: bool = True) -> None:
    """Take the first `n` lines, a job each."""
    assert feed(ledger, 0, [job_item(line) for line in range(1, n + 1)], done=done) == "ok"


def drain(ledger: LedgerOnAClock, *lines: int, kind: Any = "output") -> int:
    return ledger.run(ledger.batch_calls.drain(BATCH, [Answer(line, kind, f"answer {line}\n") for line in lines]))


def finish_job(ledger: LedgerOnAClock, line: int) -> None:
    ledger.finish(ledger.claim(job_of(line)))


def batch_field(ledger: LedgerOnAClock, name: str) -> str:
    return str(ledger.client.hget(keys.batch(BATCH), name) or "")


def status_of(ledger: LedgerOnAClock) -> str:
    return batch_field(ledger, "status")


def open_lines(ledger: LedgerOnAClock) -> list[int]:
    return [int(str(line)) for line in ledger.client.zrange(keys.batch_open(BATCH), 0, -1)]


def content(ledger: LedgerOnAClock, file: str = OUTPUT) -> str:
    """The bytes of a file, as text."""
    count = int(str(ledger.client.hget(keys.file(file), "chunks") or 0))
    return "".join(str(ledger.client.get(keys.file_chunk(file, n))) for n in range(count))


def total_bytes(ledger: LedgerOnAClock) -> int:
    return int(str(ledger.client.hget(keys.FILES_BYTES, "total") or 0))
