"""The API keys, as this process knows them: a copy of Redis' table, at most a second or two old."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from redis.exceptions import RedisError

from api.caller import Caller
from api.ending import end_tasks
from api.safety import is_loopback
from tasks import keys
from tasks.api_keys import ApiKey, KeyStore, digest_of, parse_table
from tasks.codes import CarpoolError
from tasks.redis_clients import connect, connect_async
from tasks.settings import Settings

_log = structlog.get_logger("carpool.api")
#: How often is looked whether the keys have changed.
LOOK_S: Final = 1.0
#: A copy of this age is good enough for a request, before an older one Redis is asked. So long a revoked key is good.
_FRESH_S: Final = 1.5


class Keyring:
    """Says who sends a request. What cannot be read lets nobody in.

    A key is needed as soon as there is one, good or not: revoking the last one does not open the API. It is also needed
    where others than this machine are served, unless the settings say that something else keeps strangers out.

    It has a connection of its own, so that requests that wait for theirs hold nobody up at the door.

    Args:
        listed: the keys of CARPOOL_API_KEYS_FILE.
        on_gone: called when keys have stopped to be good, for what is open with them.
    """

    def __init__(self, settings: Settings, listed: Sequence[ApiKey], on_gone: Callable[[], None]) -> None:
        self._settings = settings
        self._listed = listed
        self._client = connect_async(settings, max_connections=1)
        self._on_gone = on_gone
        self._always = bool(listed) or not (is_loopback(settings.host) or settings.allow_no_keys)
        self._table: dict[str, ApiKey] | None = None
        self._revision: str | None = None
        self._read_at = 0.0
        self._brought_in = not listed
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="carpool-keyring")

    async def close(self) -> None:
        await end_tasks([task for task in (self._watching, self._reading) if task is not None])
        await self._client.aclose()

    @property
    def is_known(self) -> bool:
        """Whether the keys have been read."""
        return self._table is not None

    @property
    def asks(self) -> bool:
        """Whether a key is needed, as far as is known."""
        return self._always or bool(self._table)

    async def admit(self, secret: str) -> Caller:
        """Whose key this is; "" for a request without one.

        Raises:
            CarpoolError: "invalid_api_key".
            RedisError: the keys cannot be read.
        """
        await self._be_fresh()
        return self._find(secret)

    def peek(self, secret: str) -> Caller | None:
        """The same by what is known, without waiting; None for who is not let in, and while nothing is known."""
        try:
            return None if self._table is None else self._find(secret)
        except CarpoolError:
            return None

    async def of_owner(self, owner: str) -> Caller:
        """The caller behind what was made earlier: what a key may, it may also when it is good no more.

        Raises:
            CarpoolError: "invalid_api_key": there is no record of it any more.
            RedisError: the keys cannot be read.
        """
        if owner == keys.NO_KEY:
            return Caller()
        await self._be_fresh()
        found = [key for key in (self._table or {}).values() if key.id == owner]
        if not found:
            raise CarpoolError("invalid_api_key", f"the API key {owner} does not exist any more")
        return Caller(owner, max(found, key=lambda key: key.created_at))

    def check(self, caller: Caller) -> None:
        """Raises CarpoolError "invalid_api_key" where the caller's key has stopped to be good since it was let in."""
        if caller.key is not None and self._table is not None:
            self._state_of(self._table.get(caller.key.digest))

    def _find(self, secret: str) -> Caller:
        if not self.asks:
            return Caller()
        if not secret:
            raise CarpoolError("invalid_api_key", _no_key(bool(self._table)))
        digest = digest_of(secret)
        found = (self._table or {}).get(digest)
        # the look-up tells nothing of a secret, whose hash cannot be chosen; the comparison takes as long for any
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise CarpoolError("invalid_api_key", "there is no such API key. Send one that exists: carpool keys list")
        self._state_of(found)
        return Caller(found.id, found)

    def _state_of(self, key: ApiKey | None) -> None:
        state = "revoked" if key is None else key.state(time.time())
        if state == "revoked":
            raise CarpoolError("invalid_api_key", "this API key was revoked. Send another one")
        if state == "expired":
            raise CarpoolError("invalid_api_key", "this API key has expired. Send another one")

    async def _be_fresh(self) -> None:
        if self._table is None or asyncio.get_running_loop().time() - self._read_at > _FRESH_S:
            await self._read_once()

    async def _read_once(self) -> None:
        """Read now. Who comes meanwhile waits for the same answer, or the same error."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="carpool-keys")
            # also where nobody is left to hear of it
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._brought_in:
            await asyncio.to_thread(self._bring_in, True)
            self._brought_in = True
        revision = await self._client.get(keys.API_KEYS_REVISION)
        if self._table is None or revision != self._revision:
            table = parse_table(await self._client.hgetall(keys.API_KEYS))
            if any(key.digest not in table for key in self._listed):
                # Redis was emptied, or lost its last writes
                await asyncio.to_thread(self._bring_in, False)
                table = parse_table(await self._client.hgetall(keys.API_KEYS))
            self._table = table
            self._revision = None if revision is None else str(revision)
        self._read_at = now

    def _bring_in(self, retire: bool) -> None:
        with connect(self._settings) as client:
            KeyStore(client).bring_in(self._listed, time.time(), retire=retire)

    async def _watch(self) -> None:
        good: set[str] = set()
        trouble = ""
        while True:
            try:
                await self._read_once()
                trouble = ""
            except RedisError as error:
                if not trouble:
                    _log.warning("keys_cannot_be_read", error=str(error))
                trouble = str(error)
            now = time.time()
            still = {digest for digest, key in (self._table or {}).items() if key.state(now) == "active"}
            if good - still:
                self._on_gone()
            good = still
            await asyncio.sleep(LOOK_S)


def _no_key(there_are_some: bool) -> str:
    if there_are_some:
        return "an API key is needed. Send it as the header Authorization: Bearer <key>"
    return "an API key is needed, and there is none yet. Make one: carpool keys create --name <name>"
