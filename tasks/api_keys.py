"""API keys: what one is, what it may, and how they are kept.

A key is 32 random bytes. Redis holds its SHA-256 and never itself, so that who reads the database has no key. A slow
hash with a salt, as passwords need, would buy nothing: there is nothing to guess in 256 random bits, and each request
would pay for it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal

import redis

from tasks import keys
from tasks.ledger_types import KeyLimits

TOKEN_PREFIX: Final = "cpk_"  # noqa: S105 # what a secret begins with, so that scanners find one that was published
ID_PREFIX: Final = "key_"

Source = Literal["command", "file"]
State = Literal["active", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as Redis knows it. Times are seconds since 1970.

    Attributes:
        digest: SHA-256 of the secret, hexadecimal.
        id: whose jobs, files and batches are made with it; two secrets of one id are one caller (a rotation).
        requests_per_minute, tokens_per_minute, max_concurrent: 0: as many as it likes.
        models: names of those that it may use; none: all.
        priority_ceiling: the first priority that it may ask for, from 0 to 9.
        source: made by the command or by CARPOOL_API_KEYS_FILE.
        revoked_by: who has revoked it, where `revoked_at` says when.
    """

    digest: str
    id: str
    name: str
    created_at: float
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    models: tuple[str, ...] = ()
    priority_ceiling: int = 0
    expires_at: float | None = None
    source: Source = "command"
    revoked_at: float | None = None
    revoked_by: Source | None = None

    @property
    def limits(self) -> KeyLimits | None:
        """What the ledger counts of it; None where nothing is limited."""
        found = KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return None if found == KeyLimits() else found

    def state(self, now: float) -> State:
        """Whether it is good, at a time in seconds since 1970."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "active"

    def public(self, now: float) -> dict[str, Any]:
        """What may be shown of it: all but the digest."""
        shown = asdict(self)
        del shown["digest"]
        return {**shown, "models": list(self.models), "state": self.state(now)}


def new_secret() -> str:
    """A key, as its caller sends it."""
    return f"{TOKEN_PREFIX}{secrets.token_urlsafe(32)}"


def new_id() -> str:
    return f"{ID_PREFIX}{secrets.token_hex(8)}"


def digest_of(secret: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def parse_table(raw: Mapping[Any, Any]) -> dict[str, ApiKey]:
    """The hash of keys as it stands in Redis, by digest.

    What a newer release says besides is passed over. A record that cannot be read is a key that is good for nothing: it
    counts as one, so that the API stays closed.
    """
    return {str(digest): _parse(str(digest), str(text)) for digest, text in raw.items()}


def _parse(digest: str, text: str) -> ApiKey:
    known = {field.name for field in fields(ApiKey)} - {"digest"}
    try:
        said = {name: value for name, value in json.loads(text).items() if name in known}
        return ApiKey(digest=digest, **{**said, "models": tuple(said.get("models", ()))})
    except (ValueError, TypeError, AttributeError):
        return ApiKey(digest, f"{ID_PREFIX}{digest[:16]}", "unreadable", 0, revoked_at=0, revoked_by="command")


#: Change one field, if it is still what the caller has read. KEYS: the keys, what changes with them. ARGV: field, what
#: it was, what it becomes ("": not there), a name for this change. A change that is sent twice has happened. A full
#: server must not keep anybody from revoking.
_SWAP: Final = """#!lua flags=allow-oom
local is = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if is == ARGV[3] then return 1 end
if is ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('SET', KEYS[2], ARGV[4])
return 1
"""


class KeyStore:
    """The keys in Redis. Every change is seen by each API process within a second or two."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def table(self) -> dict[str, ApiKey]:
        """All keys by digest, also those that are good no more. Raises RedisError."""
        return parse_table(self._client.hgetall(keys.API_KEYS))

    def add(self, key: ApiKey) -> None:
        """Keep a key."""
        self._change(key.digest, lambda _: key)

    def revoke(self, key: ApiKey, by: Source, now: float) -> None:
        """From now on it is good for nothing; its record stays, so that the API stays closed."""

        def revoked(found: ApiKey | None) -> ApiKey | None:
            if found is None or found.revoked_at is not None:
                return found
            return replace(found, revoked_at=now, revoked_by=by)

        self._change(key.digest, revoked)

    def expire(self, key: ApiKey, at: float) -> None:
        """It is good until then and no longer."""

        def expiring(found: ApiKey | None) -> ApiKey | None:
            if found is None or (found.expires_at is not None and found.expires_at <= at):
                return found
            return replace(found, expires_at=at)

        self._change(key.digest, expiring)

    def forget(self, key: ApiKey) -> None:
        """Drop the record."""
        self._change(key.digest, lambda _: None)

    def bring_in(self, listed: Iterable[ApiKey], now: float, *, retire: bool) -> None:
        """Have the keys of CARPOOL_API_KEYS_FILE as the file says.

        One that the command has revoked stays so, whatever the file says.

        Args:
            retire: revoke those that an earlier file has brought and this one does not list.
        """
        wanted = {key.digest: key for key in listed}
        for key in wanted.values():
            self._change(key.digest, lambda found, key=key: _as_listed(found, key))  # type: ignore[misc]
        if retire:
            for digest, key in self.table().items():
                if key.source == "file" and digest not in wanted:
                    self.revoke(key, "file", now)

    def _change(self, digest: str, change: Callable[[ApiKey | None], ApiKey | None]) -> None:
        while True:
            was = str(self._client.hget(keys.API_KEYS, digest) or "")
            found = parse_table({digest: was})[digest] if was else None
            wanted = change(found)
            if wanted == found:
                return
            becomes = "" if wanted is None else _as_json(wanted)
            names = (keys.API_KEYS, keys.API_KEYS_REVISION)
            if self._client.eval(_SWAP, 2, *names, digest, was, becomes, uuid.uuid4().hex):
                return


def _as_listed(found: ApiKey | None, listed: ApiKey) -> ApiKey:
    if found is None:
        return listed
    if found.source == "command" or found.revoked_by == "command":
        return found
    return replace(listed, created_at=found.created_at)


def _as_json(key: ApiKey) -> str:
    said = asdict(key)
    del said["digest"]
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))
