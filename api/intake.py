"""Accepting: from a checked request to a job or group that the ledger holds."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from api.admission import check_admitted, note_queue
from api.caller import Caller, over_limit
from api.counting import TokenCounter
from api.errors import naming_job
from api.events import as_json
from api.feed import Feed
from api.job_log import log_accepted
from api.models import Models
from api.relay import Relay
from tasks import keys
from tasks.acceptance import estimated_input, input_json, params_json
from tasks.chat import Message
from tasks.codes import CarpoolError
from tasks.job_request import JobOptions, child_seed, draw_seed
from tasks.keeper import Keeper
from tasks.ledger import AsyncLedger, script_text
from tasks.ledger_types import Acceptance, Accepted, Job
from tasks.priority import NORMAL
from tasks.redis_clients import is_pool_used_up
from tasks.registry import ModelInfo
from tasks.reports import Reports
from tasks.settings import Settings
from tasks.tracing import Tracing

_KEY: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A request that is to make its job only once, however often it is sent.

    Attributes:
        scope_hash: hash of API key, method, path and the caller's key.
        body_hash: hash of the body as canonical JSON.
    """

    scope_hash: str
    body_hash: str

    @classmethod
    def of(cls, owner: str, method: str, path: str, key: str, body: Any) -> Idempotency:
        """Raises CarpoolError where the key is not one."""
        if not _KEY.fullmatch(key):
            raise CarpoolError(
                "invalid_request",
                f"the header Idempotency-Key is {key[:80]!r}: it takes 1 to 255 printable ASCII characters",
                param="Idempotency-Key",
            )
        scope = json.dumps([owner, method, path, key]).encode()
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        return cls(hashlib.sha256(scope).hexdigest(), hashlib.sha256(canonical).hexdigest())


@dataclass(frozen=True, slots=True)
class Draft:
    """What a request asks for.

    Attributes:
        prompts: one per job; a chat is given as `messages` alone.
        copies: so many jobs of each prompt, or of the chat, one after the other.
        is_group: the jobs are the children of a group, also where there is only one.
        id_prefix: what the job's id begins with, where the client expects that; ids are UUIDs otherwise.
        request: what the endpoint needs to answer again in its own shape, as JSON.
        default_priority: of a request that names none.
        batch: the batch that this is a line of, "" where it is none. Its jobs are not counted against the key's limits.
        webhook: URL that is told of the end, checked; "" where none is. Of one job alone, not of a group.
        caller: who asks.
    """

    options: JobOptions
    default_max_tokens: int
    prompts: Sequence[str] = ()
    messages: Sequence[Message] | None = None
    copies: int = 1
    is_group: bool = False
    id_prefix: str = ""
    request: str = ""
    idempotency: Idempotency | None = None
    default_priority: int = NORMAL
    batch: str = ""
    webhook: str = ""
    caller: Caller = field(kw_only=True)

    @property
    def num_jobs(self) -> int:
        """How many jobs it makes."""
        return self.copies * (1 if self.messages is not None else len(self.prompts))

    def inputs(self) -> list[str]:
        """The input of each job as JSON."""
        if self.messages is not None:
            inputs = [input_json(None, self.messages)]
        else:
            inputs = [input_json(prompt, None) for prompt in self.prompts]
        return [one for one in inputs for _ in range(self.copies)]

    def new_id(self) -> str:
        """An id for the job or group; no second call gives the same."""
        return f"{self.id_prefix}{uuid.uuid4().hex}" if self.id_prefix else str(uuid.uuid4())

    def sequence_ids(self, id: str) -> list[str]:
        """The jobs of an accepted draft, each with a log of its own."""
        return [f"{id}.{index}" for index in range(self.num_jobs)] if self.is_group else [id]


@dataclass(frozen=True, slots=True)
class Ticket:
    """An accepted job.

    Attributes:
        is_new: this very request made it.
        durable: whether the record is on disk; None where that was not asked for.
    """

    id: str
    is_new: bool
    durable: bool | None


class Intake:
    """Accepts jobs into the ledger.

    Args:
        keeper: invites jobs of a pool; never blocks.
        models: tells whether anybody serves a pool.
        reports: tells of what was accepted.
        tracing: None where traces are off.
    """

    def __init__(
        self,
        settings: Settings,
        client: redis.asyncio.Redis,
        ledger: AsyncLedger,
        relay: Relay,
        counter: TokenCounter,
        keeper: Keeper,
        models: Models,
        reports: Reports,
        tracing: Tracing | None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._ledger = ledger
        self._relay = relay
        self._counter = counter
        self._keeper = keeper
        self._models = models
        self._reports = reports
        self._tracing = tracing
        self._logs = logging.getLogger("carpool.jobs").isEnabledFor(logging.INFO)

    async def accept(self, draft: Draft, alias: str, model: ModelInfo | None) -> Ticket:
        """Record the jobs and invite a worker, in one call.

        Raises:
            CarpoolError: it was refused, and nothing was recorded; "redis_unavailable" names the job's id where the
                answer of Redis was lost and the job may be recorded all the same.
        """
        counts = await self._check(draft, model)
        await self._check_worker(draft, alias)
        return await self._accept(draft, self._acceptance(draft, alias, model, draft.new_id(), counts))

    async def prepare(self, draft: Draft, alias: str, model: ModelInfo | None, id: str) -> Acceptance:
        """What the ledger is to accept under this id, for who has it do so together with something else.

        It may have to wait for a worker, whatever the settings say of new requests.

        Raises:
            CarpoolError: it is refused.
        """
        return self._acceptance(draft, alias, model, id, await self._check(draft, model))

    async def accept_and_follow(
        self, draft: Draft, alias: str, model: ModelInfo | None, *, ends_only: bool
    ) -> tuple[Ticket, Feed]:
        """The same, with a feed of the job. Close the feed.

        With `ends_only` it is a feed of the job or group, else one of the sequences.
        """
        counts = await self._check(draft, model)
        await self._check_worker(draft, alias)
        id = draft.new_id()
        acceptance = self._acceptance(draft, alias, model, id, counts)
        ids = [id] if ends_only else draft.sequence_ids(id)
        # The subscription is on its way together with the acceptance. Without a connection it goes first, so that
        # nothing is started that nobody can follow.
        if self._relay.is_connected:
            feed = self._relay.open(ids, ends_only=ends_only)
        else:
            feed = await self._relay.follow(ids, ends_only=ends_only)
        try:
            ticket = await self._accept(draft, acceptance)
            if ticket.is_new:
                return ticket, feed
        except BaseException:
            feed.close()
            raise
        feed.close()
        ids = [ticket.id] if ends_only else draft.sequence_ids(ticket.id)
        with naming_job(ticket.id):
            return ticket, await self._relay.follow(ids, ends_only=ends_only)

    async def _check(self, draft: Draft, model: ModelInfo | None) -> list[int]:
        """Tokens of each prompt, or of the chat: counted where anything depends on it, else estimated."""
        options = draft.options
        exact = bool(self._settings.max_queued_tokens or self._settings.max_queued_tokens_per_key)
        if draft.messages is not None:
            tools = (options.tools or ()) if options.offers_tools else ()
            count = await self._counter.check_chat(model, draft.messages, tools, options.max_tokens, exact=exact)
            return [estimated_input(None, draft.messages) if count is None else count]
        many = len(draft.prompts) > 1 or (draft.is_group and draft.copies == 1)
        counts = await self._counter.check(model, draft.prompts, options.max_tokens, many=many, exact=exact)
        return [estimated_input(prompt, None) for prompt in draft.prompts] if counts is None else counts

    async def _check_worker(self, draft: Draft, alias: str) -> None:
        """Refuse what nobody would run now, if the settings say so; a request whose job is there already gets it."""
        try:
            await self._models.check_worker(alias)
        except CarpoolError:
            known = draft.idempotency and await self._client.exists(keys.idempotency(draft.idempotency.scope_hash))
            if not known:
                raise

    async def _accept(self, draft: Draft, acceptance: Acceptance) -> Ticket:
        accepted, durable = await self._record(acceptance)
        draft.caller.spent = accepted.spent
        if accepted.queue is not None:
            note_queue(acceptance, accepted.queue, self._settings)
        if accepted.over is not None:
            raise over_limit(accepted.over)
        check_admitted(acceptance, accepted, self._settings)
        if accepted.verdict == "conflict":
            raise CarpoolError(
                "idempotency_conflict",
                f"this Idempotency-Key was used with another body, for job {accepted.id}. Take a new key for a new "
                "request, or send the same body",
                param="Idempotency-Key",
                job_id=accepted.id,
            )
        if accepted.verdict == "again":
            self._keeper.wake(acceptance.pool)
        # the same id a second time is our own call, sent again because its answer was lost
        return Ticket(accepted.id, accepted.id == acceptance.id, durable)

    def _acceptance(
        self, draft: Draft, alias: str, model: ModelInfo | None, id: str, counts: Sequence[int]
    ) -> Acceptance:
        options = draft.options
        max_tokens = options.max_tokens or min(draft.default_max_tokens, self._settings.max_tokens)
        seed = draw_seed() if options.seed is None else options.seed
        inputs = draft.inputs()
        tokens = [count for count in counts for _ in range(draft.copies)]
        # a default is clamped to what the context leaves
        most = model.context_length if model is not None and options.max_tokens is None else None
        seeds = [child_seed(seed, index) for index in range(len(inputs))] if draft.is_group else [seed]
        return Acceptance(
            id=id,
            pool=alias,
            params=params_json(options.sampling(), max_tokens),
            max_tokens=min(max_tokens, most or max_tokens),
            jobs=[Job(*job) for job in zip(seeds, inputs, tokens, strict=True)],
            deadline_s=options.deadline_s or self._settings.deadline_s,
            is_group=draft.is_group,
            seed=seed,
            tokens_are_default=options.max_tokens is None,
            metadata=as_json(options.metadata) if options.metadata is not None else "",
            user=options.user or "",
            request=draft.request,
            idempotency=draft.idempotency.scope_hash if draft.idempotency else "",
            body_hash=draft.idempotency.body_hash if draft.idempotency else "",
            priority=draft.caller.priority(options.priority, draft.default_priority),
            batch=draft.batch,
            webhook=draft.webhook,
            owner=draft.caller.owner,
            limits=None if draft.batch else draft.caller.limits,
            counted_tokens=_counted(draft, model, tokens, max_tokens),
            most_jobs=self._settings.max_queued_jobs_per_key,
            most_tokens=self._settings.max_queued_tokens_per_key,
        )

    async def _record(self, acceptance: Acceptance) -> tuple[Accepted, bool | None]:
        if self._tracing is None:
            accepted, durable = await self._write(acceptance)
        else:
            from api.tracing import accepting

            with accepting(self._tracing, acceptance) as (traced, span):
                acceptance = traced
                accepted, durable = await self._write(traced)
                span.set_attribute("carpool.verdict", accepted.verdict)
        if accepted.verdict == "ok" and self._logs:
            self._reports.put(partial(log_accepted, acceptance))
        return accepted, durable

    async def _write(self, acceptance: Acceptance) -> tuple[Accepted, bool | None]:
        try:
            if self._settings.ack_after_fsync:
                return await self._record_on_disk(acceptance)
            return await self._ledger.run(self._ledger.calls.accept(acceptance, invite=True)), None
        except (ConnectionError, TimeoutError) as error:
            if is_pool_used_up(error):
                raise  # nothing was sent
            raise CarpoolError(
                "redis_unavailable",
                f"Redis did not answer ({error}), so it is not known whether job {acceptance.id} was accepted: "
                f"GET /jobs/{acceptance.id} tells. With an Idempotency-Key, sending the same again is safe",
                job_id=acceptance.id,
                retry_after_s=1,
            ) from error

    async def _record_on_disk(self, acceptance: Acceptance) -> tuple[Accepted, bool]:
        """Accept, then wait for the append-only file: in one pipeline, since WAITAOF speaks of its own connection."""
        call = self._ledger.calls.accept(acceptance, invite=True)
        patience_ms = round(self._settings.redis_timeout_s * 750)
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.eval(script_text(call.script), len(call.keys), *call.keys, *call.args)
            pipeline.execute_command("WAITAOF", 1, 0, patience_ms)
            answer, flushed = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, RedisError):
            raise answer
        # a server without an append-only file refuses to wait for one
        durable = not isinstance(flushed, ResponseError) and int(flushed[0]) >= 1
        return call.parse(answer), durable


def _counted(draft: Draft, model: ModelInfo | None, tokens: Sequence[int], max_tokens: int) -> list[int]:
    """What each job counts as against its key's tokens a minute: those of its prompt, and all that it may generate.

    Its end puts that right. A request that leaves max_tokens to us is not refused for being too large for the limit.
    """
    limits = draft.caller.limits
    if limits is None or not limits.tokens_per_minute or draft.batch:
        return []
    counted = []
    for prompt in tokens:
        room = max_tokens if model is None or not model.context_length else model.context_length - prompt
        counted.append(prompt + max(1, min(max_tokens, room)))
    if draft.options.max_tokens is None:
        most = max(1, limits.tokens_per_minute // len(counted))
        counted = [min(one, most) for one in counted]
    return counted
