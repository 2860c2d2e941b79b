"""`carpool generate`: one completion, streamed to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ops.client import ApiClient
from ops.errors import ExitCode, OperationError


def _tell_of_wait(client: ApiClient) -> None:
    """Say what the job waits for, where no worker is ready."""
    try:
        client.get("/health/ready")
    except OperationError as error:
        sys.stderr.write(f"{error.cause}\n")


def generate(client: ApiClient, body: Mapping[str, Any], write: Callable[[str], None]) -> ExitCode:
    """Submit a job and write its text as it comes. Ctrl-C cancels the job.

    Args:
        body: of `POST /jobs`.

    Raises:
        OperationError: it was refused, or it failed.
    """
    job_id = str(client.post("/jobs", body)["id"])
    try:
        _tell_of_wait(client)
        end = client.stream(job_id, write)
    except KeyboardInterrupt:
        client.post(f"/jobs/{job_id}/cancel")
        write("\n")
        sys.stderr.write(f"Cancelled job {job_id}.\n")
        return ExitCode.INTERRUPTED
    write("\n")
    reason = end.get("finish_reason")
    if reason not in ("stop", "length"):
        raise OperationError(f"Job {job_id} was ended: {reason}", f"See: carpool jobs show {job_id}")
    return ExitCode.OK
