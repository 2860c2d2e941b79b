"""How a client of a soak puts a text together from events, over however many connections."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx2

from ops.soak.observations import ENDED, Sighting


class Follower:
    """Takes the events of one job and notes what no client should see.

    Args:
        on_resumed: called with the seconds from a break that the client did not make to the next token.

    Attributes:
        may_cut: whether this client may cut the stream now: the leaving of some cancels their job.
    """

    def __init__(self, sighting: Sighting, draw: random.Random, on_resumed: Callable[[float], None]) -> None:
        self.may_cut = True
        self._sighting = sighting
        self._draw = draw
        self._on_resumed = on_resumed
        self._broken_at: float | None = None

    def broken(self) -> None:
        """The connection broke, and not by us; tries to come back that fail are no further breaks."""
        if self._broken_at is None:
            self._broken_at = time.monotonic()
            self._sighting.breaks += 1

    @property
    def wants_to_cancel(self) -> bool:
        """The client has what it wanted before its cancel, and has not sent that yet."""
        sighting = self._sighting
        after = sighting.plan.cancel_after
        return after is not None and sighting.have >= after and not sighting.asked_to_cancel

    async def take(self, response: httpx2.Response) -> None:
        """Take events until the end, a cut or a cancel of ours, or the server's own end of the stream."""
        sighting, cut_every = self._sighting, self._sighting.plan.cut_every
        patience = self._draw.randrange(1, 2 * cut_every) if cut_every and self.may_cut else None
        async for sse in httpx2.EventSource(response):
            self._event(sse.id, json.loads(sse.data))
            if sighting.status or self.wants_to_cancel:
                return
            if patience is not None and (patience := patience - 1) <= 0:
                sighting.cuts += 1
                return
        self.broken()

    def _event(self, id: str, event: dict[str, Any]) -> None:
        sighting = self._sighting
        if "n" not in event:
            sighting.faults.append(("wrong", f"its stream said {event} after token {sighting.have}"))
            return
        if event["sequence_id"] != sighting.ids[0]:
            sighting.faults.append(("wrong", f"its stream brought an event of job {event['sequence_id']}"))
            return
        if self._broken_at is not None:
            self._on_resumed(time.monotonic() - self._broken_at)
            self._broken_at = None
        n, ends = int(event["n"]), event.get("status") in ENDED
        wanted = sighting.have if ends else sighting.have + 1
        if n != wanted:
            sighting.faults.append(("gapped" if n > wanted else "doubled", f"event {id} follows token {sighting.have}"))
        sighting.texts = [(sighting.texts or [""])[0] + str(event["token"])]
        sighting.have = n
        if ends:
            sighting.status = str(event["status"])
            sighting.ended_at = time.time()


async def replayed_texts(response: httpx2.Response, ids: list[str]) -> list[str] | None:
    """The texts of a whole stream, from its first event on, job by job; None where it was cut before its end."""
    texts, left = dict.fromkeys(ids, ""), set(ids)
    async for sse in httpx2.EventSource(response):
        event = json.loads(sse.data)
        if "n" not in event:
            return None
        texts[event["sequence_id"]] += str(event["token"])
        if event.get("status") in ENDED:
            left.discard(event["sequence_id"])
            if not left:
                return [texts[id] for id in ids]
    return None
