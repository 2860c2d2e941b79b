"""The calls of the ledger, with typed arguments and answers: one for each transition of a job (tasks/lua/)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tasks import entries, keys
from tasks.job_request import SamplingParams
from tasks.ledger_types import (
    Acceptance,
    Accepted,
    Allowance,
    Claim,
    Invitation,
    JobState,
    KeyLimits,
    OverLimit,
    QueueNumbers,
    Reaped,
    Rider,
    SlotAnswer,
    SlotWrite,
    Spent,
    Survivor,
)
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
#: A file is kept in chunks of so many bytes.
FILE_CHUNK_BYTES = 256 * 1024
#: Chunks of an upload that has not ended, since its server died, say, are forgotten after so long.
UPLOAD_S = 3600
#: What an owner used counts against it for so long after the last of its jobs has ended.
SHARE_MEMORY_MS = 10_000
#: A process that was not heard for so long no longer keeps the ledger at the version that it reads.
VERSION_GONE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script: its name, the records it speaks of, its arguments, and how to read its answer."""

    script: str
    keys: tuple[str, ...]
    args: tuple[str | int | bytes, ...]
    parse: Callable[[Any], T]


class Calls:
    """Builds the calls of the ledger, with this installation's constants.

    Args:
        invitation: template of the message of an invitation (`tasks.invitations`). Without one, jobs are marked as
            invited and no message is sent.
    """

    def __init__(self, settings: Settings, invitation: str = "") -> None:
        self.db = database(settings.redis_url)
        self._invitation = invitation
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
                "version_gone": VERSION_GONE_MS,
                "run_ahead": settings.run_ahead_steps,
                "max_attempts": settings.max_attempts,
                "max_deaths": settings.max_deaths,
                "max_claims": settings.max_claims,
                "file_chunk": FILE_CHUNK_BYTES,
                "files_most": settings.max_files_bytes,
                "upload": UPLOAD_S * 1000,
                "batch_window": settings.batch_window,
                "hook_span": round(settings.webhook_retry_s * 1000),
                "queued_jobs": settings.max_queued_jobs,
                "queued_tokens": settings.max_queued_tokens,
                "refuse_late": settings.refuse_late,
                "share_memory": SHARE_MEMORY_MS,
            },
            separators=(",", ":"),
        )

    def _call(
        self, script: str, ids: Sequence[str], args: Sequence[str | int | bytes], parse: Callable[[Any], T]
    ) -> Call[T]:
        return Call(script, tuple(keys.record(id) for id in ids), (self._config, *args), parse)

    def accept(self, request: Acceptance, *, invite: bool = False) -> Call[Accepted]:
        """Record a job or a group: accepted means recorded. With `invite` the pool is pumped in the same call."""
        body = {**acceptance_body(request), "invite": invite, "message": self._invitation if invite else ""}
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
            "params": list(SamplingParams.model_fields),
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

    def cancel(self, id: str, owner: str = "") -> Call[str]:
        """Cancel a job or a group. Answers its status where it has ended, `requested`, or `gone`.

        Here and below `owner` is who asks: what is another's is not there. "" is Carpool itself, to whom all is there.
        """
        return self._call("cancel", [id], (id, owner), str)

    def fail(self, id: str, error: dict[str, Any]) -> Call[str]:
        """End a queued job that cannot be run at all. Answers ended or no."""
        return self._call("fail", [id], (id, json.dumps(error, ensure_ascii=False)), str)

    def unclaimed(self, id: str) -> Call[str]:
        """An invitation was taken and the job not: forget the mark. Answers the job's pool, or ""."""
        return self._call("unclaimed", [id], (id,), str)

    def pump(self, pool: str, incarnation: str = "", free: int = 0) -> Call[list[Invitation]]:
        """Invite the next waiting jobs of a pool; a worker says its free slots along with it."""
        args = (pool, self._invitation, incarnation, free)
        return self._call("pump", [], args, lambda answer: [Invitation(id, pool) for id in answer])

    def reap(self) -> Call[Reaped]:
        """Look at up to 50 due jobs."""
        return self._call(
            "reap",
            [],
            (self._invitation,),
            lambda answer: Reaped(
                int(answer[0]), tuple(Invitation(*pair) for pair in zip(answer[1::2], answer[2::2], strict=True))
            ),
        )

    def agree(self) -> Call[int]:
        """Say which version this process reads. Answers the one that is written: where higher, not for this process."""
        return self._call("agree", [], (), int)

    def heartbeat(self, incarnation: str, pools: Sequence[str], ttl_ms: int, state: dict[str, str]) -> Call[bool]:
        """Say that a worker lives. True where its pools are to be pumped."""
        body = {"incarnation": incarnation, "pools": list(pools), "ttl": ttl_ms, "fields": state}
        return self._call("heartbeat", [], (json.dumps(body),), bool)

    def spend(self, owner: str, limits: KeyLimits) -> Call[tuple[Spent | None, OverLimit | None]]:
        """Count a request that makes no job. Answers what is left, and why it was refused where it was."""
        body = {"key": owner, "limits": _limits_body(limits)}
        return self._call("spend", [], (json.dumps(body),), _parse_spend)

    def forget(self, id: str, owner: str = keys.NO_KEY) -> Call[str]:
        """Delete an ended job or group. Answers forgotten, gone, riding (not ended), child (part of a group) or open (a
        line of a batch whose answer is not written yet).
        """
        return self._call("forget", [id], (id, owner), str)

    def look(self, ids: Sequence[str], *, outlook: bool = False) -> Call[list[JobState | None]]:
        """How these jobs stand, None where there is no such job; with `outlook` also their places and ETAs."""
        args = ("1" if outlook else "", *ids)
        return self._call("look", [], args, lambda answer: [_parse_state(*one) for one in answer])

    def attach(self, ttl_ms: int, waiting: Sequence[tuple[str, str]]) -> Call[str]:
        """Note for (job, member) pairs that somebody waits for the job, for `ttl_ms`."""
        return self._call("attach", [], (ttl_ms, *(part for pair in waiting for part in pair)), str)

    def detach(self, id: str, member: str = "") -> Call[int]:
        """Somebody no longer waits. Answers how many others do."""
        return self._call("detach", [], (id, member), int)

    def view(self, ids: Sequence[str], owner: str = "") -> Call[list[dict[str, Any] | None]]:
        """The object of `GET /jobs/{id}` for each id, None where there is none."""
        return self._call(
            "view", [], (owner, *ids), lambda answer: [json.loads(one) if one else None for one in answer]
        )

    def list(self, owner: str, cursor: str, size: int) -> Call[tuple[list[dict[str, Any]], str]]:
        """A page of an owner's jobs, newest first, and the cursor of the next page ("" at the end)."""
        start = f"({cursor}" if cursor else "+inf"
        return self._call(
            "list", [], (owner, start, size), lambda answer: ([json.loads(one) for one in answer[1:]], str(answer[0]))
        )


def acceptance_body(request: Acceptance) -> dict[str, Any]:
    """A request as the scripts that accept read it; the inputs of its jobs go beside it."""
    limits = {} if request.limits is None else {"limits": _limits_body(request.limits)}
    trace = {"trace": request.trace} if request.trace else {}
    counted = {"counted": list(request.counted_tokens)} if request.counted_tokens else {}
    return {
        **limits,
        **counted,
        **trace,
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
        "tokens": [job.prompt_tokens + request.max_tokens for job in request.jobs],
        "max": request.max_tokens,
        "most_jobs": request.most_jobs,
        "most_tokens": request.most_tokens,
        "user": request.user,
        "request": request.request,
        "idem": request.idempotency,
        "body": request.body_hash,
        "native": "1" if request.native else "",
        "priority": request.priority,
        "batch": request.batch,
        "webhook": request.webhook,
    }


def _limits_body(limits: KeyLimits) -> dict[str, int]:
    return {"rpm": limits.requests_per_minute, "tpm": limits.tokens_per_minute, "jobs": limits.jobs_at_once}


def _parse_accepted(answer: list[str], pool: str) -> Accepted:
    verdict, id, account, *invited = answer
    found = json.loads(account) if account else {}
    return Accepted(
        verdict,
        id,
        tuple(Invitation(one, pool) for one in invited),
        _parse_queue(found.get("queue")),
        _parse_spent(found.get("spent")),
        _parse_over(found.get("over")),
    )


def _parse_queue(found: dict[str, Any] | None) -> QueueNumbers | None:
    return None if found is None else QueueNumbers(**found)


def _parse_spent(found: dict[str, Any] | None) -> Spent | None:
    if found is None:
        return None
    return Spent(*(None if found[what] is None else Allowance(*found[what]) for what in ("requests", "tokens")))


def _parse_spend(answer: list[str]) -> tuple[Spent | None, OverLimit | None]:
    spent, over = (json.loads(part) if part else None for part in answer)
    return _parse_spent(spent), _parse_over(over)


def _parse_over(found: dict[str, Any] | None) -> OverLimit | None:
    if found is None:
        return None
    return OverLimit(found["what"], found["limit"], found["used"], found["asked"], found["wait"])


def _parse_claim(answer: list[str]) -> Claim:
    verdict = str(answer[0])
    if verdict != "ok":
        return Claim(verdict)
    epoch, k, strikes, struck_at, stop, deadline, params, seed, given, default_tokens, boarded, version = answer[1:13]
    trace, created_at, life = answer[13:]
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
        version=int(version),
        created_at_ms=int(created_at),
        trace=trace,
        life=life,
    )


def _parse_state(status: str, k: str, lease_ms: str, position: str, has_worker: str, eta_ms: str) -> JobState | None:
    if not status:
        return None
    return JobState(status, int(k), int(lease_ms), int(position), bool(has_worker), int(eta_ms) if eta_ms else None)


def _parse_slots(answer: list[list[str]]) -> list[SlotAnswer]:
    return [SlotAnswer(verdict, int(k) if str(k).isdecimal() else -1, str(stop)) for verdict, k, stop in answer]
