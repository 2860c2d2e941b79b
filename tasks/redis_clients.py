"""Redis clients as Carpool wants them: bounded waits, one retry, and a server that keeps what it is given."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from packaging.version import Version
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.exceptions import (
    ConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry as SyncRetry

from tasks import entries, keys
from tasks.codes import CarpoolError
from tasks.settings import Settings

OLDEST_REDIS = Version("7.2")
OLDEST_VALKEY = Version("7.2")


class ServerRefused(CarpoolError):
    """A Redis server, or the ledger in it, that this release cannot work with: another try would not mend it."""

    def __init__(self, message: str) -> None:
        super().__init__("redis_unavailable", message)


def redacted(url: str) -> str:
    """The URL without its password, for logs and messages."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    host = parts.netloc.rsplit("@", 1)[-1]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def database(url: str) -> int:
    """Number of the database in a Redis URL."""
    path = urlsplit(url).path.strip("/")
    return int(path) if path.isdecimal() else 0


def connect(settings: Settings) -> redis.Redis:
    """A client for threads: each call waits at most `redis_timeout_s`, and is sent a second time if that failed."""
    return redis.Redis.from_url(
        settings.redis_url,
        decode_responses=True,
        socket_timeout=settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        retry=SyncRetry(ConstantBackoff(0.05), 1),
        health_check_interval=0,
    )


def connect_async(settings: Settings, max_connections: int = 64) -> redis.asyncio.Redis:
    """The same for the event loop. A pool that is used up makes callers wait; it never grows with the clients.

    They wait for longer than for an answer: a burst of hundreds of requests on a busy machine is no outage of Redis.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.redis_url,
        max_connections=max_connections,
        timeout=5 * settings.redis_timeout_s,
        decode_responses=True,
        socket_timeout=settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        retry=AsyncRetry(ConstantBackoff(0.05), 1),
        health_check_interval=0,
    )
    return redis.asyncio.Redis.from_pool(pool)


def is_pool_used_up(error: RedisError) -> bool:
    """Whether a call of an async client got no connection of its pool in time: it was not sent. Redis may be well."""
    return isinstance(error, ConnectionError) and isinstance(error.__cause__, asyncio.TimeoutError)


def check_server(client: redis.Redis, url: str) -> None:
    """Refuse a server that would lose jobs, and a ledger of a newer release.

    Raises:
        CarpoolError: with the command that mends it; ServerRefused where it answers and cannot be used.
    """
    where = redacted(url)
    try:
        server = client.info("server")
        memory = client.info("memory")
    except RedisError as error:
        raise _no_answer(where, error) from error
    valkey = server.get("valkey_version")
    version = Version(str(valkey or server["redis_version"]))
    if version < (OLDEST_VALKEY if valkey else OLDEST_REDIS):
        raise ServerRefused(f"the server at {where} has version {version}. Carpool needs Redis or Valkey 7.2 or newer")
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerRefused(
            f"Redis at {where} has maxmemory-policy {policy}, which deletes accepted jobs when memory is short. "
            "Run: redis-cli CONFIG SET maxmemory-policy noeviction (and write it into its configuration)",
        )
    try:
        check_schema(client)
    except (ConnectionError, TimeoutError) as error:  # a server that still reads its file answers INFO alone
        raise _no_answer(where, error) from error


def _no_answer(where: str, error: RedisError) -> CarpoolError:
    return CarpoolError(
        "redis_unavailable", f"Redis at {where} does not answer ({error}). Start it, or set CARPOOL_REDIS_URL"
    )


def check_schema(client: redis.Redis) -> None:
    """Write the ledger's version where there is none. Raises ServerRefused for one that this release cannot read."""
    write_even_when_full(client, "SET", keys.SCHEMA, entries.VERSION, "NX")
    found = int(client.get(keys.SCHEMA) or entries.VERSION)
    if found > entries.VERSION:
        raise ServerRefused(ledger_is_newer(found))
    if found < entries.VERSION - 1:
        raise ServerRefused(
            f"the ledger in Redis has version {found}, this release reads {entries.VERSION - 1} and {entries.VERSION}. "
            "Run the release between the two on it for a minute first: an upgrade skips none"
        )


def ledger_is_newer(version: int) -> str:
    """What to tell whoever runs this release on a ledger of a newer one."""
    return (
        f"the ledger in Redis is of a newer release (version {version}, this one reads up to {entries.VERSION}). "
        "Upgrade: pip install --upgrade carpool"
    )


def is_full(error: RedisError) -> bool:
    """Whether the server refused a write because its memory is used up."""
    return isinstance(error, OutOfMemoryError) or (
        isinstance(error, ResponseError) and str(error).startswith(("OOM", "command not allowed when used memory"))
    )


#: What a server answers that can't take writes now: it lost its primary, its disk is full, or a script holds it up.
_NOT_NOW = ("MISCONF", "NOREPLICAS", "TRYAGAIN", "CLUSTERDOWN", "BUSY")


def takes_no_writes(error: RedisError) -> bool:
    """Whether the server refused a write for a reason that will pass, as an outage does."""
    return isinstance(error, ReadOnlyError | MasterDownError) or (
        isinstance(error, ResponseError) and str(error).startswith(_NOT_NOW)
    )


_EVEN_WHEN_FULL = "#!lua flags=allow-oom\nreturn redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))"


def write_even_when_full(client: redis.Redis, command: str, key: str, *arguments: str | int | float) -> Any:
    """One write, also where the server's memory is used up: what accepted jobs need so that they come to their end."""
    return client.eval(_EVEN_WHEN_FULL, 1, key, command, *arguments)


async def write_even_when_full_async(
    client: redis.asyncio.Redis, command: str, key: str, *arguments: str | int | float
) -> Any:
    """The same for the event loop."""
    return await client.eval(_EVEN_WHEN_FULL, 1, key, command, *arguments)
