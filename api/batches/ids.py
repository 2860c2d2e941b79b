"""Ids around a batch: all are made of the batch's own, so that whoever does a thing twice names the same."""

from __future__ import annotations

import uuid
from typing import Final

from api.batches.file_store import ID_PREFIX

BATCH_PREFIX: Final = "batch_"


def new_batch_id() -> str:
    return f"{BATCH_PREFIX}{uuid.uuid4().hex}"


def _stem(batch: str) -> str:
    return batch.removeprefix(BATCH_PREFIX)


def output_file(batch: str) -> str:
    """Id of the file with the answers."""
    return f"{ID_PREFIX}{_stem(batch)}-output"


def errors_file(batch: str) -> str:
    """Id of the file with the answers to what did not succeed."""
    return f"{ID_PREFIX}{_stem(batch)}-errors"


def job_prefix(batch: str, prefix: str) -> str:
    """What the ids of a batch's jobs begin with; the line's number follows. `prefix` is that of the endpoint's jobs."""
    return f"{prefix}{_stem(batch)}."


def request_id(batch: str, line: int) -> str:
    """Id of a line's answer."""
    return f"batch_req_{_stem(batch)}_{line}"
