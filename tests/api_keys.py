"""API keys for a test: made in Redis as the command makes them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import redis

from tasks.api_key_terms import parse_terms
from tasks.api_keys import ApiKey, KeyStore, digest_of, new_id, new_secret


@dataclass(frozen=True)
class Holder:
    """A key with its secret, as whoever was given it has them."""

    key: ApiKey
    secret: str

    @property
    def id(self) -> str:
        return self.key.id

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}


def make_key(client: redis.Redis, name: str = "test", **terms: str) -> Holder:
    """A new key with these terms, as the command line takes them."""
    now = time.time()
    secret = new_secret()
    key = ApiKey(digest_of(secret), new_id(), name, now, **parse_terms(terms, now))
    KeyStore(client).add(key)
    return Holder(key, secret)


def revoke(client: redis.Redis, holder: Holder) -> None:
    KeyStore(client).revoke(holder.key, "command", time.time())
