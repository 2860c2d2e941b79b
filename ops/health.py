"""`carpool health`: does this one part live? What Compose's health checks and Kubernetes' probes run beside it.

Each part is known by its own word: an API and Flower by an answer, workers by their heartbeat. Nothing is asked through
the broker, so a worker with a long prefill is as healthy as an idle one.
"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import Final

from redis.exceptions import RedisError

from ops.errors import ExitCode, OperationError
from tasks.redis_clients import connect, redacted
from tasks.registry import list_workers
from tasks.settings import Settings
from tasks.webhook_workers import list_webhook_workers

HEALTH_ROLES: Final = ("api", "worker", "webhooks", "flower")
_ANSWER_S = 4.0
#: A worker that lives and will never serve.
_HOPELESS = frozenset({"broken"})


def check_health(settings: Settings, role: str, name: str, port: int, *, ready: bool, without_redis: bool) -> str:
    """Ask one part of this machine how it is; returns that in a few words.

    Args:
        role: one of HEALTH_ROLES.
        name: of a worker; only one of this host counts.
        port: of Flower.
        ready: a worker has to have its model loaded, an API a worker that can ride.
        without_redis: a worker whose heartbeat cannot be read, since Redis does not answer, passes: a restart would
            mend nothing, and lose a loaded model. An API need not take jobs.

    Raises:
        OperationError: it does not live (FAILED), is not ready (NOT_READY), or Redis does not answer (UNAVAILABLE).
    """
    if role == "flower":
        return _answers(f"http://127.0.0.1:{port}/healthcheck", "Flower")
    if role == "api":
        what = "live" if without_redis else "ready" if ready else "accepting"
        return _answers(f"http://{_address(settings.host)}:{settings.port}/health/{what}", "The API")
    try:
        state = _state(settings, role, name)
    except RedisError as error:
        if without_redis:
            return f"{name}: not known, Redis does not answer"
        raise OperationError(
            f"Redis at {redacted(settings.redis_url)} does not answer ({error})",
            "Start it, or set CARPOOL_REDIS_URL",
            ExitCode.UNAVAILABLE,
        ) from error
    if state is None:
        raise OperationError(f"No heartbeat of {name} on {socket.gethostname()}", "Look at the worker's log")
    if state in _HOPELESS:
        raise OperationError(f"{name}: {state}", "Look at the worker's log")
    if ready and state != "ready":
        raise OperationError(f"{name}: {state}", "Wait until its model is loaded", ExitCode.NOT_READY)
    return f"{name}: {state}"


def _state(settings: Settings, role: str, name: str) -> str | None:
    here = (name, socket.gethostname())
    with connect(settings) as client:
        if role == "webhooks":
            heard = {(worker.name, worker.host) for worker in list_webhook_workers(client)}
            return "ready" if here in heard else None
        return next((one.state for one in list_workers(client) if (one.name, one.host) == here), None)


def _address(host: str) -> str:
    """Where this machine itself reaches what listens on `host`."""
    address = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _answers(url: str, what: str) -> str:
    # a proxy in the environment is not for this machine's own address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            return f"{what}: {answer.status}"
    except urllib.error.HTTPError as error:
        raise OperationError(f"{what} answers {error.code} at {url}", "Look at its log") from error
    except OSError as error:
        raise OperationError(f"{what} does not answer at {url} ({error})", "Look at its log") from error
