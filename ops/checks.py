"""The preconditions of an instance, in the order in which they are looked at: by `up` up to the first broken one, by
`doctor` all of them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ops import preflight
from ops.device_plan import find_gpus, plan_devices
from ops.embedded_redis import find_program, program_version
from ops.hub_model import check_hub_model, is_hub_name
from tasks.redis_clients import redacted
from tasks.settings import Settings
from tasks.webhook_secrets import webhook_secrets


@dataclass(frozen=True, slots=True)
class Check:
    """One precondition.

    Attributes:
        run: says in a few words what is there. Raises OperationError, SettingsError or CarpoolError for what is broken.
    """

    name: str
    run: Callable[[], str]


def is_embedded(settings: Settings) -> bool:
    """Whether the instance starts a server of its own."""
    return "redis_url" not in settings.model_fields_set


def preconditions(settings: Settings) -> Iterator[Check]:
    """What has to hold before anything is started, whether or not an instance runs; the port is not among them."""
    yield Check("python", _python)
    yield Check("packages", lambda: _packages(settings))
    yield Check("model", lambda: _model(settings))
    yield Check("access", lambda: _access(settings))
    yield Check("disk", lambda: _disk(settings))
    yield Check("webhooks", lambda: _webhooks(settings))
    yield Check("devices", lambda: _devices(settings))
    yield Check("redis", lambda: _redis(settings))


def _python() -> str:
    preflight.check_python()
    return platform.python_version()


def _packages(settings: Settings) -> str:
    preflight.check_engine(settings)
    return f"all that the engine {settings.engine} needs"


def _model(settings: Settings) -> str:
    if settings.engine == "simulated":
        return "none is needed"
    return check_model(settings)


def check_model(settings: Settings) -> str:
    """The model that is named is there, or the hub gives it; returns which. Raises PreconditionError."""
    preflight.check_model_path(settings)
    return check_hub_model(settings) if is_hub_name(settings) else settings.model


def _access(settings: Settings) -> str:
    preflight.check_host(settings, embedded=is_embedded(settings))
    preflight.check_keys_file(settings)
    return f"{settings.host} is served"


def _disk(settings: Settings) -> str:
    preflight.check_data_dir(settings)
    preflight.check_disk(settings)
    return f"room in {settings.data_dir}"


def _webhooks(settings: Settings) -> str:
    secrets = webhook_secrets(settings)
    return "are signed" if secrets else "off, since CARPOOL_WEBHOOK_SECRET is not set"


def _devices(settings: Settings) -> str:
    gpus = find_gpus(settings)
    devices = plan_devices(settings, gpus)
    where = f", {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} seen" if gpus else ""
    return f"{', '.join(devices) or 'no worker'}{where}"


def _redis(settings: Settings) -> str:
    if is_embedded(settings):
        program = find_program()
        return f"{program.name} {program_version(program)}, started by up"
    preflight.check_redis(settings)
    return redacted(settings.redis_url)
