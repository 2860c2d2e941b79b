"""The ledger's calls for files and batches, with typed arguments and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tasks.batch_types import Answer, BatchState, FeedPage, NewBatch, NewFile, Position
from tasks.calls import Call, Calls, acceptance_body


class BatchCalls(Calls):
    """The calls of the ledger, and those for files and batches."""

    def append_chunk(self, file: str, n: int, data: bytes) -> Call[int | None]:
        """Write chunk `n` of an upload. Answers None, or how many bytes all files have where they may have no more."""
        return self._call(
            "file_append", [], (file, n, data), lambda answer: int(answer[1]) if answer[0] == "full" else None
        )

    def finish_file(self, file: NewFile) -> Call[tuple[str, str]]:
        """An upload has ended. Answers ok, again, conflict or lost (a chunk is gone), and the id."""
        body = {
            "id": file.id,
            "filename": file.filename,
            "purpose": file.purpose,
            "bytes": file.num_bytes,
            "chunks": file.num_chunks,
            "ttl": round(file.ttl_s * 1000),
            "key": file.owner,
            "idem": file.idempotency,
            "body": file.body_hash,
        }
        return self._call("file_finish", [], (json.dumps(body, ensure_ascii=False),), _verdict_and_id)

    def delete_file(self, id: str, num_chunks: int = 0, owner: str = "") -> Call[str]:
        """Delete a file, or the chunks of an upload that is given up. Answers deleted, gone or in_use."""
        return self._call("file_delete", [], (id, num_chunks, owner), str)

    def create_batch(self, batch: NewBatch) -> Call[tuple[str, str]]:
        """Record a batch. Answers ok, again, conflict, no_file or purpose (of a file that is not for batches), and what
        it speaks of: an id, or that purpose.
        """
        body = {
            "id": batch.id,
            "prefix": batch.job_prefix,
            "file": batch.file,
            "endpoint": batch.endpoint,
            "completion_window": batch.completion_window,
            "window": round(batch.window_s * 1000),
            "keep": round(batch.keep_s * 1000),
            "metadata": batch.metadata,
            "output": batch.output,
            "errors_file": batch.errors_file,
            "key": batch.owner,
            "idem": batch.idempotency,
            "body": batch.body_hash,
        }
        return self._call("batch_create", [], (json.dumps(body, ensure_ascii=False),), _verdict_and_id)

    def validated(self, id: str, num_requests: int, errors: str = "") -> Call[str]:
        """The whole input was looked at. `errors`: what is wrong with it, as JSON. Answers the status."""
        return self._call("batch_validated", [], (id, num_requests, errors), str)

    def look_at_batch(self, id: str) -> Call[BatchState | None]:
        """How a batch stands, None where there is none; one whose time is over turns to its end."""
        return self._call("batch_look", [], (id,), _parse_state)

    def feed(self, id: str, page: FeedPage) -> Call[str]:
        """Take the next lines and move the cursor on. Answers ok; or moved, full, turned, over, and nothing changed."""
        items: list[dict[str, Any]] = []
        inputs: list[str] = []
        for item in page.items:
            if item.acceptance is None:
                items.append({"line": str(item.line), "answer": item.answer})
            else:
                items.append({"line": str(item.line), "accept": acceptance_body(item.acceptance)})
                inputs.extend(job.input for job in item.acceptance.jobs)
        body = {
            "id": id,
            "from": str(page.after),
            "line": str(page.next.line),
            "chunk": str(page.next.chunk),
            "offset": str(page.next.offset),
            "done": page.done,
            "errors": page.errors,
            "items": items,
        }
        return self._call("batch_feed", [], (json.dumps(body, ensure_ascii=False), *inputs), str)

    def drain(self, id: str, answers: Sequence[Answer]) -> Call[int]:
        """Write answers, each once. Answers how many were."""
        args = [part for answer in answers for part in (answer.line, answer.kind, answer.text)]
        return self._call("batch_drain", [], (id, *args), int)

    def cancel_batch(self, id: str, owner: str = "") -> Call[str]:
        """Take no further line, and have those that ride stopped. Answers the status, or gone."""
        return self._call("batch_cancel", [], (id, owner), str)


def _verdict_and_id(answer: list[str]) -> tuple[str, str]:
    verdict, id = answer
    return verdict, id


def _parse_state(answer: list[str]) -> BatchState | None:
    if answer[0] == "gone":
        return None
    status, ending, file, endpoint, prefix, owner, line, chunk, offset, fed, room, *rest = answer
    return BatchState(
        status,
        ending,
        file,
        endpoint,
        prefix,
        owner,
        Position(int(line), int(chunk), int(offset)),
        bool(fed),
        int(room) if room else None,
        {int(number): job for number, job in zip(rest[::2], rest[1::2], strict=True)},
    )
