"""Everything one API process holds while it serves: clients of Redis, the relay, the keeper of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Self

import structlog
from fastapi import Request
from redis.exceptions import RedisError

from api.attachments import Attachments
from api.caller import Caller, over_limit
from api.counting import TokenCounter
from api.events import Cursor, EventRenderer, Renderer
from api.feed import Feed
from api.follower import Follower
from api.intake import Intake
from api.keyring import Keyring
from api.models import Models
from api.onlook import Onlook
from api.relay import Relay
from api.revokes import RevokeListener
from api.stream import JobEvents, JobStream
from api.webhooks import WebhookGate
from tasks.api_keys import ApiKey
from tasks.app import create_celery
from tasks.codes import CarpoolError
from tasks.invitations import invitation_template
from tasks.keeper import Keeper
from tasks.ledger import AsyncLedger
from tasks.ledger_types import JobState
from tasks.redis_clients import connect_async
from tasks.reports import Reports
from tasks.settings import Settings
from tasks.tracing import Tracing

_log = structlog.get_logger("carpool.api")


class Service:
    """The parts, opened and closed together.

    Args:
        listed_keys: those of CARPOOL_API_KEYS_FILE.
        tracing: makes its spans; None where traces are off.

    Attributes:
        num_streams: that are open now.
        num_resumes: streams that went on from where a client was.
        stopping: set when the server is to end. Streams and waits then end at once, and no job is cancelled for it.
    """

    def __init__(self, settings: Settings, listed_keys: Sequence[ApiKey] = (), tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.webhooks = WebhookGate(settings)
        self.client = connect_async(settings)
        self._celery = create_celery(settings)
        invitation = invitation_template(self._celery)
        self.ledger = AsyncLedger(self.client, settings, invitation)
        self.calls = self.ledger.calls
        self.stopping = asyncio.Event()
        self.models = Models(self.client, settings)
        self.onlook = Onlook(self.ledger, self.models, settings)
        self.attachments = Attachments(self.ledger)
        self.relay = Relay(settings, self.look)
        self._keeper = Keeper(settings, invitation)
        self._revokes = RevokeListener(settings, self._celery)
        self._counter = TokenCounter(self.client)
        self.keyring = Keyring(settings, listed_keys, self.relay.wake_all)
        self.reports = Reports()
        self.intake = Intake(
            settings,
            self.client,
            self.ledger,
            self.relay,
            self._counter,
            self._keeper,
            self.models,
            self.reports,
            tracing,
        )
        self._background: set[asyncio.Task[None]] = set()
        self.num_streams = 0
        self.num_resumes = 0
        self.server_is_checked = False

    async def __aenter__(self) -> Self:
        self.reports.start()
        self._keeper.start()
        self._revokes.start()
        self.relay.start()
        self.attachments.start()
        self.keyring.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self.keyring.close()
        await self.relay.close()
        await self.attachments.close()
        if self._background:
            await asyncio.wait(self._background, timeout=2 * self.settings.redis_timeout_s)
        await asyncio.to_thread(self._keeper.close)
        await asyncio.to_thread(self._revokes.close)
        await asyncio.to_thread(self._celery.close)
        await asyncio.to_thread(self.reports.close)
        self._counter.close()
        await self.client.aclose()

    def stop(self) -> None:
        """End streams and waits, so that clients take them up again on another replica."""
        self.stopping.set()
        self.relay.wake_all()

    async def look(self, ids: Sequence[str]) -> list[JobState | None]:
        """How jobs stand."""
        return await self.ledger.run(self.calls.look(ids))

    async def outlook(self, ids: Sequence[str]) -> list[JobState | None]:
        """The same, with the places and ETAs of those that wait."""
        return await self.ledger.run(self.calls.look(ids, outlook=True))

    async def count(self, caller: Caller) -> None:
        """Count a request that makes no job. Raises CarpoolError "rate_limit_exceeded"."""
        if caller.limits is None:
            return
        caller.spent, over = await self.ledger.run(self.calls.spend(caller.owner, caller.limits))
        if over is not None:
            raise over_limit(over)

    async def view(self, id: str, owner: str = "") -> dict[str, Any]:
        """The object of `GET /jobs/{id}`; what is not the owner's is not there, "" sees all.

        Raises:
            CarpoolError: "job_not_found".
        """
        view = (await self.ledger.run(self.calls.view([id], owner)))[0]
        if view is None:
            raise job_not_found(id)
        return view

    async def views(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The same for several jobs. Raises CarpoolError "job_not_found"."""
        views = await self.ledger.run(self.calls.view(ids))
        found = [view for view in views if view is not None]
        if len(found) < len(views):
            raise job_not_found(ids[views.index(None)])
        return found

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something that nobody waits for; an outage of Redis only leaves it undone."""

        async def run() -> None:
            try:
                await work
            except RedisError as error:
                _log.warning("left_undone_without_redis", error=str(error))

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def wake_pool(self, pool: str) -> None:
        """Jobs of this pool were accepted: have workers invited. Returns at once."""
        self._keeper.wake(pool)

    async def cancel_abandoned(self, id: str) -> None:
        """The client that posted this job has left: cancel it, unless somebody else waits for it."""
        if not await self.attachments.num_others(id):
            await self.ledger.run(self.calls.cancel(id))

    async def attach_and_follow(self, id: str, ids: Sequence[str]) -> tuple[str, Feed]:
        """A feed of the sequences of a job that goes on for as long as somebody follows it.

        Returns:
            The attachment, which `open_stream` takes as its member, and the feed.
        """
        member = await self.attachments.attach(id)
        try:
            return member, await self.relay.follow(ids)
        except BaseException:
            self.in_background(self.attachments.detach(member))
            raise

    def check_streams(self) -> None:
        """Raises CarpoolError "too_many_streams" where this process has as many open streams as it may."""
        if self.num_streams >= self.settings.max_streams:
            raise CarpoolError(
                "too_many_streams",
                f"this server has {self.num_streams} open streams, the most it may (CARPOOL_MAX_STREAMS). Try "
                "again, or poll the job",
                retry_after_s=5,
            )

    def open_stream(
        self,
        feed: Feed,
        cursors: Sequence[Cursor],
        headers: dict[str, str],
        caller: Caller,
        *,
        renderer: Renderer | None = None,
        cancel_abandoned: str = "",
        member: str = "",
        resumes: bool = False,
    ) -> JobEvents:
        """The event stream of a feed, which is closed with it.

        Args:
            caller: who follows it; when its key is revoked the stream ends, and no job for it.
            renderer: the dialect of the events; None: that of `/jobs/{id}/stream`.
            cancel_abandoned: id of the job that ends if the client leaves; "": none does.
            member: attachment that ends with the stream; "": none.
            resumes: the client has a part of it already, whatever the cursors say.
        """
        followers = [Follower(cursor.n, ended=cursor.ended) for cursor in cursors]
        feed.have = [cursor.n for cursor in cursors]
        stream = JobStream(
            self.client,
            self.outlook,
            feed,
            followers,
            renderer or EventRenderer(feed.ids, cursors),
            self.settings.sse_heartbeat_s,
            self.stopping,
            partial(self.keyring.check, caller),
        )
        self.num_streams += 1
        self.num_resumes += resumes or any(cursor.n or cursor.ended for cursor in cursors)

        def ended(client_left: bool) -> None:
            self.num_streams -= 1
            feed.close()
            if member:
                self.in_background(self.attachments.detach(member))
            if client_left and cancel_abandoned and not self.stopping.is_set():
                self.in_background(self.cancel_abandoned(cancel_abandoned))

        return JobEvents(stream, headers, ended)


def job_not_found(id: str) -> CarpoolError:
    """No such job, or no longer."""
    return CarpoolError(
        "job_not_found", f"there is no job {id[:128]!r}: it never was, was deleted, or is kept no longer"
    )


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service = request.app.state.service
    if not isinstance(service, Service):
        raise TypeError("the application serves only within its lifespan")
    return service
