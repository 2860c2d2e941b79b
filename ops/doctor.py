"""`carpool doctor`: every precondition of an instance, whether it runs or not, and what to do about a broken one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Final, Literal

import httpx2
import redis
from redis.exceptions import RedisError, ResponseError

from ops import preflight
from ops.checks import Check, is_embedded, preconditions
from ops.embedded_redis import free_port
from ops.errors import OperationError, PreconditionError
from ops.instance import DataDir, FileLock, RunFile
from ops.up import FLOWER_PORT, carpool_command
from tasks.codes import CarpoolError
from tasks.redis_clients import connect
from tasks.settings import NOT_FOR_CHILDREN, Settings, SettingsError

#: torch's import, and a model's configuration from the hub.
_EXAMINE_S: Final = 120.0
_ANSWER_S: Final = 5.0
#: Each stream is a descriptor; `up` raises its own limit up to the hard one.
_FEW_DESCRIPTORS: Final = 4096


class Doubtful(Exception):
    """It will work, and not as well as it could.

    Attributes:
        cause, fix: as of OperationError.
    """

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and what came of it.

    Attributes:
        detail: what is there, or the cause.
        remedy: one thing to do; "" where nothing has to be done, or where the detail says it.
    """

    check: str
    state: Literal["ok", "warning", "broken"]
    detail: str
    remedy: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at everything, one after another."""
    data = DataDir(settings.data_dir.expanduser().absolute())
    run = _running(data)
    if run is not None and is_embedded(settings):
        settings = settings.model_copy(update={"redis_url": run.redis_url, "data_dir": data.root})
    broken: set[str] = set()
    for check in _checks(settings, data, run):
        if check.name == "memory" and broken & {"python", "packages", "model"}:
            continue  # it would say the same again, after a while
        finding = _look(check)
        if finding.state == "broken":
            broken.add(finding.check)
        yield finding


def _look(check: Check) -> Finding:
    try:
        return Finding(check.name, "ok", check.run())
    except Doubtful as doubt:
        return Finding(check.name, "warning", doubt.cause, doubt.fix)
    except OperationError as error:
        return Finding(check.name, "broken", error.cause, error.fix)
    except (SettingsError, CarpoolError) as error:
        return Finding(check.name, "broken", str(error))


def _checks(settings: Settings, data: DataDir, run: RunFile | None) -> Iterator[Check]:
    yield Check("instance", lambda: _instance(data, run))
    yield from preconditions(settings)
    yield Check("port", lambda: _port(settings, run))
    yield Check("flower", lambda: _flower(settings, run))
    yield Check("persistence", lambda: _persistence(settings, run))
    yield Check("descriptors", _descriptors)
    if settings.engine != "simulated":
        yield Check("memory", lambda: _memory(settings, run))


def _running(data: DataDir) -> RunFile | None:
    """The instance that runs in the data dir."""
    try:
        run = RunFile.read(data.run_file)
    except PreconditionError:  # the check of the instance says so
        return None
    supervisor = run.supervisor if run is not None else None
    alive = supervisor is not None and supervisor.identity is not None and supervisor.identity.alive
    return run if alive else None


def _instance(data: DataDir, run: RunFile | None) -> str:
    RunFile.read(data.run_file)
    if run is not None:
        return f"runs in {data.root}, {run.api_url}"
    if data.lock.exists():
        lock = FileLock(data.lock)
        if not lock.acquire():
            raise PreconditionError(
                f"Another process ({lock.holder()}) holds {data.lock}", "Wait for it, or name another --data-dir"
            )
        lock.release()
    return f"none runs in {data.root}"


def _port(settings: Settings, run: RunFile | None) -> str:
    if run is not None:
        return _answers(run.api_url)
    return f"{preflight.claim_port(settings.host, settings.port)} is free"


def _answers(url: str) -> str:
    """The port is this instance's own: then its API has to be what answers there."""
    try:
        with httpx2.Client(timeout=_ANSWER_S, trust_env=False) as client:
            answer = client.get(f"{url}/health/accepting")
    except httpx2.HTTPError as error:
        raise PreconditionError(f"The API does not answer at {url} ({error})", "Look at its log") from error
    if answer.status_code != HTTPStatus.OK:
        raise PreconditionError(f"The API at {url} takes no jobs ({answer.status_code})", "Look at its log")
    return f"{url} is this instance's own, and takes jobs"


def _flower(settings: Settings, run: RunFile | None) -> str:
    if not settings.flower:
        return "off"
    if run is not None and any(entry.role == "flower" for entry in run.processes):
        return "runs"
    try:
        return f"{preflight.claim_port('127.0.0.1', FLOWER_PORT)} is free"
    except PreconditionError as error:
        raise Doubtful(error.cause, f"Nothing: another one is taken, such as {free_port()}") from None


def _persistence(settings: Settings, run: RunFile | None) -> str:
    if is_embedded(settings) and run is None:
        return f"append-only file, fsync {settings.appendfsync}"
    try:
        with connect(settings) as client:
            said = client.info("persistence")
            fsync = _fsync(client)
    except (RedisError, ValueError):
        raise Doubtful("Not known, since Redis cannot be asked", "Look at the check of Redis") from None
    if not said.get("aof_enabled"):
        raise Doubtful(
            "Redis keeps no append-only file: accepted jobs are lost when it ends",
            "Run: redis-cli CONFIG SET appendonly yes (and write it into its configuration)",
        )
    if said.get("aof_last_write_status") == "err":
        raise PreconditionError("Redis cannot write its append-only file", "Look at its log and its disk")
    if fsync == "no":
        raise Doubtful(
            "Redis leaves it to the system when accepted jobs are on disk (appendfsync no)",
            "Run: redis-cli CONFIG SET appendfsync everysec (and write it into its configuration)",
        )
    return f"append-only file, fsync {fsync}" if fsync else "append-only file"


def _fsync(client: redis.Redis) -> str:
    """Its setting; "" of a server that does not tell."""
    try:
        return str(client.config_get("appendfsync").get("appendfsync", ""))
    except ResponseError:
        return ""


def _descriptors() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_DESCRIPTORS:
        raise Doubtful(
            f"This user may have {hard} descriptors open, and each stream is one", "Raise the limit: ulimit -Hn 65536"
        )
    return "as many as this user wants" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"


def _memory(settings: Settings, run: RunFile | None) -> str:
    """What the worker itself looks at before it loads the weights."""
    if run is not None and any(entry.role == "worker" and entry.state == "running" for entry in run.processes):
        return "a worker has its model loaded"
    command = [*carpool_command()[:-1], "worker.model_check"]
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    environment = {**inherited, **settings.renders_as_environment}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_EXAMINE_S, env=environment)
    except subprocess.TimeoutExpired:
        raise Doubtful(
            f"{settings.model} could not be examined within {_EXAMINE_S:g} s", "Look at the network and the disk"
        ) from None
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PreconditionError(
            f"The model could not be examined: {last}", "Start it, and look at the worker's log"
        ) from None
    if "error" in said:
        raise PreconditionError(str(said["error"]), "")
    return f"room for {said['detail']}"


def as_line(finding: Finding) -> str:
    """One line: the check, its state, what is there, what to do."""
    separator = "" if not finding.remedy or finding.detail.endswith((".", "!", "?")) else "."
    text = f"{finding.detail}{separator} {finding.remedy}".rstrip()
    return f"{finding.check:<12} {finding.state:<8} {' '.join(text.split())}"


def as_json(found: Sequence[Finding]) -> str:
    """A list with one object for each finding."""
    return json.dumps([asdict(finding) for finding in found], indent=2)
