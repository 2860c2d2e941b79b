"""The ledger: every transition of a job as one atomic script (tasks/lua/).

`tasks/calls.py` builds a call, `SyncLedger` and `AsyncLedger` run it: the worker has threads, the API an event loop,
and the contract is written once. docs/protocol.md explains the transitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from tasks.calls import Call, Calls
from tasks.settings import Settings

T = TypeVar("T")


#: What every script has, in this order.
_SHARED = ("prelude", "objects", "ends", "invitations")
#: What waits, whose turn it is, and how long that takes: scripts have it in the table Q. In two parts, the second of
#: which many calls do without.
_QUEUE = (("queue",), ("shares", "rates"))
#: A part that reads the inside of those.
_INSIDE = "admission"
#: Parts that some scripts share, and stand before them in this order.
_FILES = ("files",)
_BATCHES = ("files", "batches")
_WEBHOOKS = ("webhooks",)
PARTS = {
    "accept": ("acceptance", "admission", "key_limits", *_WEBHOOKS),
    "webhook_pump": _WEBHOOKS,
    "webhook_claim": _WEBHOOKS,
    "webhook_settle": _WEBHOOKS,
    "spend": ("key_limits",),
    "file_append": _FILES,
    "file_finish": _FILES,
    "file_delete": _FILES,
    "batch_create": _BATCHES,
    "batch_validated": _BATCHES,
    "batch_look": ("admission", *_BATCHES),
    "batch_feed": ("acceptance", "admission", *_BATCHES),
    "batch_drain": _BATCHES,
    "batch_cancel": _BATCHES,
}
#: What a full server refuses: whatever brings new work. Running jobs can always end.
_NEW_WORK = frozenset({"accept", "file_append", "file_finish", "batch_create", "batch_feed"})


@cache
def _sources() -> dict[str, str]:
    """All files of `tasks/lua`, by name.

    Read together: an upgrade that replaces them under a process that runs must not give it another release's script.
    """
    lua = files("tasks") / "lua"
    return {file.name.removesuffix(".lua"): file.read_text() for file in lua.iterdir() if file.name.endswith(".lua")}


def script_text(name: str) -> str:
    """A script as the server gets it."""
    shebang = "#!lua" if name in _NEW_WORK else "#!lua flags=allow-oom"
    parts = PARTS.get(name, ())
    queue = _at_once if _INSIDE in parts else _when_needed
    shared = (_sources()[part] for part in _SHARED)
    rest = (_sources()[part] for part in (*parts, name))
    return "\n".join([shebang, *shared, queue(_QUEUE), *rest])


def _at_once(parts: Sequence[Sequence[str]]) -> str:
    return "\n".join(_sources()[name] for names in parts for name in names)


def _when_needed(parts: Sequence[Sequence[str]]) -> str:
    """Parts that fill the table Q when a call first wants a function of it.

    The server keeps a script compiled, but makes each of its functions anew with every call. A decoding step, the most
    frequent call of all, would spend a third of its time on these and end no job.
    """
    if not parts:
        return ""
    return "\n".join(
        [
            "setmetatable(Q, { __index = function(_, name)",
            "setmetatable(Q, nil)",
            *(_sources()[name] for name in parts[0]),
            _when_needed(parts[1:]),
            "return Q[name]",
            "end })",
        ]
    )


class SyncLedger:
    """Runs calls on a client of a thread."""

    def __init__(self, client: redis.Redis, settings: Settings, invitation: str = "") -> None:
        self.client = client
        self.calls = Calls(settings, invitation)
        self._digests: dict[str, str] = {}
        _sources()

    def run(self, call: Call[T]) -> T:
        """Run a call. Raises RedisError where the server does not answer in time."""
        digest = self._digest(call.script)
        try:
            answer = self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            self.client.script_load(script_text(call.script))
            answer = self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        return call.parse(answer)

    def run_all(self, calls: Iterable[Call[T]]) -> list[T]:
        """Run calls one after the other, in one round trip.

        Raises RedisError where the server does not answer in time or refuses one: others may have been run.
        """
        todo = list(calls)
        if len(todo) == 1:
            return [self.run(todo[0])]
        with self.client.pipeline(transaction=False) as pipeline:
            for call in todo:
                pipeline.evalsha(self._digest(call.script), len(call.keys), *call.keys, *call.args)
            answers = pipeline.execute(raise_on_error=False)
        return [self._answer(call, answer) for call, answer in zip(todo, answers, strict=True)]

    def _answer(self, call: Call[T], answer: object) -> T:
        if isinstance(answer, NoScriptError):
            return self.run(call)
        if isinstance(answer, Exception):
            raise answer
        return call.parse(answer)

    def _digest(self, script: str) -> str:
        digest = self._digests.get(script)
        if digest is None:
            digest = self._digests[script] = str(self.client.script_load(script_text(script)))
        return digest


class AsyncLedger:
    """Runs calls on the event loop."""

    def __init__(self, client: redis.asyncio.Redis, settings: Settings, invitation: str = "") -> None:
        self.client = client
        self.calls = Calls(settings, invitation)
        self._digests: dict[str, str] = {}
        _sources()

    async def run(self, call: Call[T]) -> T:
        """Run a call. Raises RedisError where the server does not answer in time."""
        digest = self._digests.get(call.script)
        if digest is None:
            digest = self._digests[call.script] = str(await self.client.script_load(script_text(call.script)))
        try:
            answer = await self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            await self.client.script_load(script_text(call.script))
            answer = await self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        return call.parse(answer)
