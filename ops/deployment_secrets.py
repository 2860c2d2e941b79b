"""`carpool make-secrets`: the passwords of a deployment, each made once and kept in a file of its own.

Compose runs it before everything else, so that `docker compose up` needs nothing prepared and no two installations have
the same password. What is there already stays as it is, so one's own secrets can be put in its place.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ops.errors import PreconditionError

#: Of a server that only its own network reaches: its user is another one than ours, so the file is open to both.
_SHARED: Final = 0o644
_OWN: Final = 0o600
_PASSWORD_BYTES: Final = 24


def make_secrets(folder: Path, redis_host: str) -> list[Path]:
    """Write the secrets that are not there yet; returns their files.

    Args:
        folder: gets one folder for each part that has to read them: `redis`, `webhooks`, `flower`, `grafana`.
        redis_host: where the parts reach the server, `host` or `host:port`.

    Raises:
        PreconditionError: a file cannot be written.
    """
    written = []

    def make(name: str, mode: int, text: Callable[[], str]) -> str:
        path = folder / name
        try:
            if path.exists():
                return path.read_text().strip()
            path.parent.mkdir(parents=True, exist_ok=True)
            value = text()
            _write(path, value, mode)
        except OSError as error:
            raise PreconditionError(
                f"{path} cannot be written ({error.strerror})", "Name a folder that this user may write to"
            ) from error
        written.append(path)
        return value.strip()

    password = make("redis/password", _SHARED, _password)
    make("redis/redis.conf", _SHARED, lambda: f"requirepass {password}")
    make("redis/url", _SHARED, lambda: f"redis://:{password}@{redis_host}/0")
    make("webhooks/secret", _OWN, lambda: f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}")
    make("flower/password", _OWN, _password)
    make("grafana/password", _SHARED, _password)
    return written


def _password() -> str:
    return secrets.token_urlsafe(_PASSWORD_BYTES)


def _write(path: Path, value: str, mode: int) -> None:
    """The whole file or none: a part of a password would be kept for ever."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)  # whatever the umask says
        file.write(f"{value}\n")
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
