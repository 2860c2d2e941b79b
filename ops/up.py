"""`carpool up`: checks everything that can be checked, then runs the instance under the supervisor."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from ops import preflight
from ops.checks import preconditions
from ops.child import ChildSpec
from ops.device_plan import find_gpus, plan_devices
from ops.display import Display
from ops.embedded_redis import EmbeddedRedis, free_port
from ops.errors import ExitCode, PreconditionError
from ops.instance import DataDir, FileLock, Role, RunFile
from ops.process import signal_group, wait_until_ended
from ops.redis_guardian import MARGIN_S, STOP_S
from ops.supervisor import Plan, Supervisor
from tasks.lifeline import LIFELINE_VARIABLE
from tasks.process_name import PROCESS_NAME_VARIABLE
from tasks.settings import NOT_FOR_CHILDREN, PREFIX, Settings, read_secret_file
from tasks.webhook_secrets import webhook_secrets

FLOWER_PORT = 5555
API_STOP_S = 20.0
_DESCRIPTORS = 65536
_NEED_WEBHOOK_SECRETS: Final = frozenset({"api", "webhooks"})


def raise_descriptor_limit() -> None:
    """Every stream is a descriptor: take as many as this user may have, up to 65536. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def api_url(host: str, port: int) -> str:
    """A URL that can be opened on this machine for what listens on `host`."""
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def carpool_command(*arguments: str) -> tuple[str, ...]:
    """A part of Carpool as a command. -P: a folder `api` or `tasks` where the user happens to be must not hide ours."""
    return (sys.executable, "-P", "-m", "ops.cli", *arguments)


def run_up(settings: Settings, display: Display) -> ExitCode:
    """Check, start, supervise, drain.

    Raises:
        OperationError: nothing was started (PreconditionError), or a part was given up.
    """
    data = DataDir(settings.data_dir.expanduser().absolute())
    data.create()
    lock = FileLock(data.lock)
    if not lock.acquire():
        raise PreconditionError(
            f"An instance already runs in {data.root} (process {lock.holder()})",
            "Stop it with: carpool stop; or start this one with another --data-dir and --port",
        )
    try:
        await_leftovers(data, display)
        settings = check(settings.model_copy(update={"data_dir": data.root}), display)
        devices = plan_devices(settings, find_gpus(settings))
        raise_descriptor_limit()
        with ExitStack() as stack:
            plan = make_plan(settings, data, stack, devices)
            return asyncio.run(_supervise(plan, display))
    finally:
        lock.release()


async def _supervise(plan: Plan, display: Display) -> ExitCode:
    return await Supervisor(plan, display).run()


def await_leftovers(data: DataDir, display: Display) -> None:
    """Processes of an earlier run whose supervisor was killed still drain: wait for them, then end what is left."""
    old = RunFile.read(data.run_file)
    if old is None:
        return
    left = {entry.name: entry.identity for entry in old.processes if entry.identity and entry.identity.alive}
    if not left:
        return
    display.phase("earlier run", f"waiting for {', '.join(left)} to drain")
    alive = wait_until_ended(list(left.values()), old.drain_s + MARGIN_S)
    for identity in alive:
        signal_group(identity.pid, signal.SIGKILL)
    wait_until_ended(alive, STOP_S)
    display.done("earlier run", "has ended")


def check(settings: Settings, display: Display) -> Settings:
    """All checks before anything is loaded; returns the settings with the port that was found.

    Raises:
        PreconditionError: the first one that does not hold.
    """
    display.phase("checks", "port, disk, engine, model, redis")
    for one in preconditions(settings):
        if one.name != "devices":  # they are planned with what is known of them, right after
            one.run()
    port = preflight.claim_port(settings.host, settings.port)
    display.forget("checks")
    return settings.model_copy(update={"port": port})


def make_plan(settings: Settings, data: DataDir, stack: ExitStack, devices: Sequence[str]) -> Plan:
    """The processes to start. The pipes through which they hear of the supervisor's end are closed with `stack`.

    Args:
        devices: of the workers, one each.
    """
    lifeline, _ = _pipe(stack)  # its write end is in this process alone, until it ends
    tenants, tenants_writer = _pipe(stack)
    embedded = None
    if "redis_url" not in settings.model_fields_set:
        embedded = EmbeddedRedis.prepare(data.redis, settings)
        settings = settings.model_copy(update={"redis_url": embedded.url})
    base = _child_environment(settings, lifeline)
    sends_webhooks = bool(webhook_secrets(settings))
    flower_port = _flower_port() if settings.flower else None
    flower_password = _flower_password(settings)

    def spec(role: Role, name: str, stop_s: float, **environment: str) -> ChildSpec:
        arguments = {"redis": ("--tenants-fd", str(tenants)), "flower": ("--port", str(flower_port))}.get(role, ())
        return ChildSpec(
            role=role,
            name=name,
            command=carpool_command(role, *arguments),
            environment={**_what_it_needs(role, base), PROCESS_NAME_VARIABLE: name, **environment},
            stop_s=stop_s,
            pass_fds=(lifeline, tenants_writer),
        )

    redis = None
    if embedded is not None:
        redis = replace(
            spec("redis", "redis", STOP_S + 5),
            pass_fds=(lifeline, tenants),
            kill_signal=signal.SIGTERM,  # at once, but with its append-only file on disk
        )
    # requests without a model go to that of our own workers, also before the first of them has registered it
    default = {"CARPOOL_DEFAULT_MODEL": settings.default_model or settings.pool} if devices else {}
    others = [spec("api", "api", API_STOP_S, **default)]
    others += [
        spec("worker", f"worker-{n}", settings.drain_s + MARGIN_S, CARPOOL_DEVICE=device)
        for n, device in enumerate(devices, start=1)
    ]
    if sends_webhooks:
        others.append(spec("webhooks", "webhooks", settings.webhook_timeout_s + MARGIN_S))
    notes: tuple[tuple[str, str], ...] = ()
    if flower_port is not None:
        # The password goes by the environment, since every user of the machine can read a command line.
        others.append(spec("flower", "flower", API_STOP_S, FLOWER_BASIC_AUTH=f"carpool:{flower_password}"))
        shown = settings.flower_password_file and f"that of {settings.flower_password_file}"
        notes = (("Flower", f"http://127.0.0.1:{flower_port} (user carpool, password {shown or flower_password})"),)
    run_file = RunFile(
        api_url=api_url(settings.host, settings.port),
        redis_url=settings.redis_url,
        embedded_redis=embedded is not None,
        pool=settings.pool,
        engine=settings.engine,
        drain_s=settings.drain_s,
        started_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )
    return Plan(settings, data, run_file, redis, tuple(others), flower_port, notes)


def _pipe(stack: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    stack.callback(os.close, writer)
    return reader, writer


def _child_environment(settings: Settings, lifeline: int) -> Mapping[str, str]:
    # nobody calls an API here, and what stood in a file is passed on as it is
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    return {
        **inherited,
        **settings.renders_as_environment,
        LIFELINE_VARIABLE: str(lifeline),
        "PYTHONUNBUFFERED": "1",  # what a killed child wrote stands in its log
    }


def _what_it_needs(role: Role, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without secrets that are none of this part's business."""
    hidden = () if role in _NEED_WEBHOOK_SECRETS else (f"{PREFIX}WEBHOOK_SECRET", f"{PREFIX}WEBHOOK_SECRET_FILE")
    return {name: value for name, value in environment.items() if name not in hidden}


def _flower_password(settings: Settings) -> str:
    if settings.flower_password_file is None:
        return secrets.token_urlsafe(12)
    return read_secret_file(settings.flower_password_file, "CARPOOL_FLOWER_PASSWORD_FILE")


def _flower_port() -> int:
    try:
        return preflight.claim_port("127.0.0.1", FLOWER_PORT)
    except PreconditionError:
        return free_port()
