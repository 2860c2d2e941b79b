"""The ledger: every transition of a job as one atomic script (tasks/lua/), with typed arguments and answers.

`Calls` builds a call, `SyncLedger` and `AsyncLedger` run it: the worker has threads, the API an event loop, and the
contract is written once. docs/protocol.md explains the transitions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from tasks import entries, keys
from tasks.redis_clients import database
from tasks.settings import Settings

T = TypeVar("T")
#: An invitation that nobody took for so long counts as lost.
INVITATION_MS = 3000
#: A job that waits to be taken up again is looked at at least this often: what bounds its next ride.
LOOK_AGAIN_MS = 10_000
#: So long must a pool's ready workers have lacked a job's model until the job is ended.
MODEL_GONE_MS = 60_000
MAX_DEADLINE_S = 7 * 86400
TOMBSTONE_S = 7 * 86400


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script: its name, the records it speaks of, its arguments, and how to read its answer."""

    script: str
    keys: tuple[str, ...]
    args: tuple[str | int, ...]
    parse: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Job:
    """One job to be accepted. `input` is `{"prompt": …}` or `{"messages": …}` as JSON."""

    seed: int
    input: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A request to accept one job, or a group of them (`is_group`; the children are `<id>.<i>`).

    Attributes:
        params: the sampling parameters as JSON, without the seed.
        tokens_are_default: max_tokens was not asked for, so the worker may clamp it to the context.
        deadline_s: from now.
        owner: whose list the job stands in (an API key's id; "all" without keys).
        user: the caller's own name for whoever asks; recorded without effect.
        idempotency, body_hash: hash of scope and key, hash of the canonical body; "" without a key.
    """

    id: str
    pool: str
    params: str
    jobs: Sequence[Job]
    deadline_s: float
    is_group: bool = False
    seed: int = 0
    tokens_are_default: bool = False
    metadata: str = ""
    owner: str = "all"
    user: str = ""
    idempotency: str = ""
    body_hash: str = ""
    native: bool = False


@dataclass(frozen=True, slots=True)
class Invitation:
    """A job that a Celery message is to be sent for."""

    id: str
    pool: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """ok: new. again: this id or idempotency key is known, `id` is its job. conflict: known with another body.

    tomb: a task of that id was sent with plain Celery, has ended, and its record is gone. `invitations` are to be sent.
    """

    verdict: str
    id: str
    invitations: tuple[Invitation, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim. `verdict`: ok, gone, ended, taken, mismatch (other model), newer (other release).

    The rest is set for ok: the epoch of this ride, tokens in the log, deaths so far, a stop that is wanted ("" or a
    final status), the deadline in ms, what to generate, and whether it has boarded.
    """

    verdict: str
    epoch: int = 0
    k: int = 0
    strikes: int = 0
    struck_at: int = -1
    stop: str = ""
    deadline_ms: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    input: dict[str, Any] = field(default_factory=dict)
    tokens_are_default: bool = False
    boarded: bool = False


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """What one decoding step writes for one slot. Without ids it renews, with a `final` status it ends the job.

    Attributes:
        first: index of the first of `ids` (or of the next token): must be the ledger's k + 1.
        board: the sequence is about to be given to the child.
        texts: one per id.
        final: "" or succeeded, failed, cancelled, expired; only with every token in.
        tail: text that was still held back.
        error: the error as JSON where `final` is failed.
    """

    id: str
    epoch: int
    nonce: str
    first: int
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    board: bool = False
    prompt_tokens: int | None = None
    final: str = ""
    finish_reason: str = ""
    tail: str = ""
    error: str = ""

    def arguments(self) -> tuple[str | int, ...]:
        data = entries.encode_tokens(self.first + len(self.ids) - 1, self.ids, self.texts) if self.ids else ""
        return (
            self.id,
            self.epoch,
            self.nonce,
            "1" if self.board else "",
            "" if self.prompt_tokens is None else self.prompt_tokens,
            self.first,
            len(self.ids),
            data,
            "".join(self.texts),
            self.final,
            self.finish_reason,
            self.tail,
            self.error,
        )


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """ok; at (the ledger holds `k`: send again from there); ended (under this owner); fenced (not ours); error.

    `stop` is a final status that is wanted, "" where none is; for ended the status of the job, for error its text.
    """

    verdict: str
    k: int
    stop: str


@dataclass(frozen=True, slots=True)
class Rider:
    """Who asks: a job, and the epoch and nonce of the claim under which it rides."""

    id: str
    epoch: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """What became of a rider whose process died: back (it may board again), ended or fenced; its strikes, and where."""

    verdict: str
    strikes: int
    struck_at: int


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job or a group stands, for one who waits. A group has a status alone; it stays queued until it has ended.

    Attributes:
        k: tokens in the log.
        lease_ms: until the lease of a running job runs out; negative where it has.
        position: place in the queue from 1, 0 where it waits in none.
        has_worker: whether a worker of the pool of a queued job is ready.
    """

    status: str
    k: int
    lease_ms: int
    position: int
    has_worker: bool

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many due jobs were looked at (50 is the most of one call), and which are to be invited."""

    looked_at: int
    invitations: tuple[Invitation, ...]


class Calls:
    """Builds the calls of the ledger, with this installation's constants."""

    def __init__(self, settings: Settings) -> None:
        self.db = database(settings.redis_url)
        self._config = json.dumps(
            {
                "db": self.db,
                "version": entries.VERSION,
                "lease": round(settings.lease_s * 1000),
                "grace": round(settings.grace_s * 1000),
                "tick_stale": round(max(3.0, 3 * settings.reaper_tick_s) * 1000),
                "retention": round(settings.retention_s * 1000),
                "idempotency": round(settings.idempotency_s * 1000),
                "tombstone": TOMBSTONE_S * 1000,
                "deadline_most": MAX_DEADLINE_S * 1000,
                "invitation": INVITATION_MS,
                "look_again": LOOK_AGAIN_MS,
                "model_gone": MODEL_GONE_MS,
                "run_ahead": settings.run_ahead_steps,
                "max_attempts": settings.max_attempts,
                "max_deaths": settings.max_deaths,
                "max_claims": settings.max_claims,
            },
            separators=(",", ":"),
        )

    def _call(self, script: str, ids: Sequence[str], args: Sequence[str | int], parse: Callable[[Any], T]) -> Call[T]:
        return Call(script, tuple(keys.record(id) for id in ids), (self._config, *args), parse)

    def accept(self, request: Acceptance, *, invite: bool = False) -> Call[Accepted]:
        """Record a job or a group: accepted means recorded. With `invite` the pool is pumped in the same call."""
        body: dict[str, Any] = {
            "id": request.id,
            "pool": request.pool,
            "model": request.pool,
            "params": request.params,
            "seeds": [str(job.seed) for job in request.jobs],
            "seed": str(request.seed if request.is_group else request.jobs[0].seed),
            "deadline": round(request.deadline_s * 1000),
            "group": request.is_group,
            "default_tokens": "1" if request.tokens_are_default else "",
            "metadata": request.metadata,
            "key": request.owner,
            "user": request.user,
            "idem": request.idempotency,
            "body": request.body_hash,
            "native": "1" if request.native else "",
            "invite": invite,
        }
        ids = [f"{request.id}.{i}" for i in range(len(request.jobs))] if request.is_group else [request.id]
        args = (json.dumps(body, ensure_ascii=False), *(job.input for job in request.jobs))
        return self._call("accept", ids, args, lambda answer: _parse_accepted(answer, request.pool))

    def claim(
        self, id: str, nonce: str, fingerprint: str, incarnation: str, worker: str, pid: int, *, board: bool = False
    ) -> Call[Claim]:
        """Make this worker the one owner of a job. With `board` one that nothing died with boards in the same call."""
        asked = {
            "id": id,
            "nonce": nonce,
            "fingerprint": fingerprint,
            "incarnation": incarnation,
            "worker": worker,
            "pid": pid,
            "board": board,
        }
        return self._call("claim", [id], (json.dumps(asked),), _parse_claim)

    def step(self, writes: Sequence[SlotWrite]) -> Call[list[SlotAnswer]]:
        """One decoding step of all slots. A slot's error does not touch the others."""
        args: list[str | int] = [len(writes)]
        for write in writes:
            args.extend(write.arguments())
        return self._call("step", [write.id for write in writes], args, _parse_slots)

    def renew(self, riders: Sequence[Rider]) -> Call[list[SlotAnswer]]:
        """Renew the leases of these riders: a step without tokens that does not look at their position."""
        return self.step([SlotWrite(rider.id, rider.epoch, rider.nonce, first=0) for rider in riders])

    def child_died(self, generation: str, cause: str, riders: Sequence[Rider]) -> Call[list[Survivor]]:
        """The Model worker died under these riders: charge those who may have caused it.

        `generation` is `<incarnation>.<number>`; the numbers of one incarnation rise.
        """
        args: list[str | int] = [generation, cause, len(riders)]
        for rider in riders:
            args.extend((rider.id, rider.epoch, rider.nonce))
        return self._call(
            "child_died",
            [rider.id for rider in riders],
            args,
            lambda answer: [Survivor(verdict, int(strikes), int(at)) for verdict, strikes, at in answer],
        )

    def release(self, rider: Rider) -> Call[str]:
        """Hand a job back, without a charge. Answers released, fenced, or the status that a stop ended it with."""
        return self._call("release", [rider.id], (rider.id, rider.epoch, rider.nonce), str)

    def cancel(self, id: str) -> Call[str]:
        """Cancel a job or a group. Answers its status where it has ended, `requested`, or `gone`."""
        return self._call("cancel", [id], (id,), str)

    def fail(self, id: str, error: dict[str, Any]) -> Call[str]:
        """End a queued job that cannot be run at all. Answers ended or no."""
        return self._call("fail", [id], (id, json.dumps(error, ensure_ascii=False)), str)

    def unclaimed(self, id: str) -> Call[str]:
        """An invitation was taken and the job not: forget the mark. Answers the job's pool, or ""."""
        return self._call("unclaimed", [id], (id,), str)

    def pump(self, pool: str, incarnation: str = "", free: int = 0) -> Call[list[Invitation]]:
        """Mark the next waiting jobs of a pool as invited; a worker says its free slots along with it."""
        args = (pool, incarnation, free)
        return self._call("pump", [], args, lambda answer: [Invitation(id, pool) for id in answer])

    def reap(self) -> Call[Reaped]:
        """Look at up to 50 due jobs."""
        return self._call(
            "reap",
            [],
            (),
            lambda answer: Reaped(
                int(answer[0]), tuple(Invitation(*pair) for pair in zip(answer[1::2], answer[2::2], strict=True))
            ),
        )

    def heartbeat(self, incarnation: str, pools: Sequence[str], ttl_ms: int, state: dict[str, str]) -> Call[bool]:
        """Say that a worker lives. True where its pools are to be pumped."""
        body = {"incarnation": incarnation, "pools": list(pools), "ttl": ttl_ms, "fields": state}
        return self._call("heartbeat", [], (json.dumps(body),), bool)

    def forget(self, id: str, owner: str = "all") -> Call[str]:
        """Delete an ended job or group. Answers forgotten, gone, riding (not ended) or child (part of a group)."""
        return self._call("forget", [id], (id, owner), str)

    def look(self, ids: Sequence[str]) -> Call[list[JobState | None]]:
        """How these jobs stand, None where there is no such job."""
        return self._call("look", [], tuple(ids), lambda answer: [_parse_state(*one) for one in answer])

    def attach(self, ttl_ms: int, waiting: Sequence[tuple[str, str]]) -> Call[str]:
        """Note for (job, member) pairs that somebody waits for the job, for `ttl_ms`."""
        return self._call("attach", [], (ttl_ms, *(part for pair in waiting for part in pair)), str)

    def detach(self, id: str, member: str = "") -> Call[int]:
        """Somebody no longer waits. Answers how many others do."""
        return self._call("detach", [], (id, member), int)

    def view(self, ids: Sequence[str]) -> Call[list[dict[str, Any] | None]]:
        """The object of `GET /jobs/{id}` for each id, None where there is none."""
        return self._call("view", [], tuple(ids), lambda answer: [json.loads(one) if one else None for one in answer])

    def list(self, owner: str, cursor: str, size: int) -> Call[tuple[list[dict[str, Any]], str]]:
        """A page of an owner's jobs, newest first, and the cursor of the next page ("" at the end)."""
        start = f"({cursor}" if cursor else "+inf"
        return self._call(
            "list", [], (owner, start, size), lambda answer: ([json.loads(one) for one in answer[1:]], str(answer[0]))
        )


def _parse_accepted(answer: list[str], pool: str) -> Accepted:
    verdict, id, *invited = answer
    return Accepted(verdict, id, tuple(Invitation(one, pool) for one in invited))


def _parse_claim(answer: list[str]) -> Claim:
    verdict = str(answer[0])
    if verdict != "ok":
        return Claim(verdict)
    epoch, k, strikes, struck_at, stop, deadline, params, seed, given, default_tokens, boarded = answer[1:]
    return Claim(
        verdict,
        epoch=int(epoch),
        k=int(k),
        strikes=int(strikes),
        struck_at=int(struck_at),
        stop=stop,
        deadline_ms=int(deadline),
        params=json.loads(params),
        seed=int(seed),
        input=json.loads(given),
        tokens_are_default=bool(default_tokens),
        boarded=bool(boarded),
    )


def _parse_state(status: str, k: str, lease_ms: str, position: str, has_worker: str) -> JobState | None:
    if not status:
        return None
    return JobState(status, int(k), int(lease_ms), int(position), bool(has_worker))


def _parse_slots(answer: list[list[str]]) -> list[SlotAnswer]:
    return [SlotAnswer(verdict, int(k) if str(k).isdecimal() else -1, str(stop)) for verdict, k, stop in answer]


@cache
def script_text(name: str) -> str:
    """A script as the server gets it. Only `accept` is refused by a full server: running jobs can always end."""
    lua = files("tasks") / "lua"
    shebang = "#!lua" if name == "accept" else "#!lua flags=allow-oom"
    return f"{shebang}\n{(lua / 'prelude.lua').read_text()}\n{(lua / f'{name}.lua').read_text()}"


class SyncLedger:
    """Runs calls on a client of a thread."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self.client = client
        self.calls = Calls(settings)
        self._digests: dict[str, str] = {}

    def run(self, call: Call[T]) -> T:
        """Run a call. Raises RedisError where the server does not answer in time."""
        digest = self._digests.get(call.script)
        if digest is None:
            digest = self._digests[call.script] = str(self.client.script_load(script_text(call.script)))
        try:
            answer = self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            self.client.script_load(script_text(call.script))
            answer = self.client.evalsha(digest, len(call.keys), *call.keys, *call.args)
        return call.parse(answer)


class AsyncLedger:
    """Runs calls on the event loop."""

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        self.client = client
        self.calls = Calls(settings)
        self._digests: dict[str, str] = {}

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
