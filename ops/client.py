"""The command line as a client of the API: which instance, what it answered, a stream that outlives its connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx2

from ops.errors import ExitCode, OperationError
from ops.instance import DataDir, RunFile

#: How long a stream that was cut is tried again before the command gives up; the job itself goes on.
RESUME_S = 60.0
_RETRY_FIRST_S = 0.1
_RETRY_LONGEST_S = 2.0
#: Longer than the heartbeat comment of a silent stream: nothing for so long is a dead connection.
_SILENCE_S = 60.0


def find_url(data: DataDir, url: str | None) -> str:
    """The API's address: as given, else of the instance in this data dir. Raises OperationError where there is none."""
    if url is not None:
        return url.rstrip("/")
    run = RunFile.read(data.run_file)
    api = next((entry for entry in run.processes if entry.role == "api"), None) if run is not None else None
    if run is None or api is None or api.state in ("stopped", "failed"):
        raise OperationError(
            f"No instance runs in {data.root}",
            "Start one with: carpool up; or name one with --url or --data-dir",
            ExitCode.NOT_RUNNING,
        )
    return run.api_url


class ApiClient:
    """Calls of one API. Every error it answers becomes an OperationError with its message.

    Args:
        api_key: sent along with each call; "" sends none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(30, read=_SILENCE_S)
        # trust_env: a proxy in the environment is for the world outside.
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        return self._call("GET", path, params={name: str(value) for name, value in query.items()})

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, json=body)

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx2.TransportError as error:
            raise OperationError(
                f"Nothing answers at {self._url} ({type(error).__name__})",
                "See what runs with: carpool status",
                ExitCode.NOT_RUNNING,
            ) from error
        if response.is_error:
            raise _refused(response.status_code, response.text)
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, job_id: str, write: Callable[[str], None]) -> dict[str, Any]:
        """Write a job's text as it comes, taking the stream up again wherever the connection was cut.

        Returns:
            The last event, with `finish_reason` and `usage`.

        Raises:
            OperationError: the job failed, or the API was away for longer than a minute.
        """
        cursor, have = "", 0
        until, pause = time.monotonic() + RESUME_S, _RETRY_FIRST_S
        while time.monotonic() < until:
            with suppress(httpx2.TransportError):
                headers = {"Last-Event-ID": cursor} if cursor else {}
                with self._http.stream("GET", f"/jobs/{job_id}/stream", headers=headers) as response:
                    if response.status_code not in (200, 502, 503):
                        raise _refused(response.status_code, response.read().decode(errors="replace"))
                    for sse in httpx2.EventSource(response) if response.status_code == 200 else ():
                        until, pause = time.monotonic() + RESUME_S, _RETRY_FIRST_S
                        event: dict[str, Any] = json.loads(sse.data)
                        cursor = sse.id or cursor
                        ended = bool(event.get("finish_reason") or event.get("error"))
                        n = int(event.get("n", have))
                        if n > have or ended:
                            write(event.get("token") or "")
                        have = max(have, n)
                        if event.get("error"):
                            raise OperationError(str(event["error"]["message"]), f"See: carpool jobs show {job_id}")
                        if ended:
                            return event
            time.sleep(pause)  # the API is away: nothing tells when it is back
            pause = min(2 * pause, _RETRY_LONGEST_S)
        raise OperationError(
            f"The stream of job {job_id} was cut, and the API did not come back within {RESUME_S:g} s",
            f"The job goes on. Later: carpool jobs show {job_id}",
        )


def _refused(status: int, body: str) -> OperationError:
    """What the API answered, as an error: its own message where it has one."""
    try:
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return OperationError(f"The API answered {status}: {body[:200]}", "Is this Carpool's address?")
    if status == HTTPStatus.UNAUTHORIZED:
        # never as an option: every user of the machine can read a command line
        return OperationError(message, "The command line takes it from the environment: set CARPOOL_API_KEY")
    return OperationError(message, f"(field {param}, HTTP {status})" if param else f"(HTTP {status})")
