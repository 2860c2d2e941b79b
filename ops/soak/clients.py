"""The clients of a soak: they ask, follow, cut and resume, cancel, send again, and note what they see."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Final

import httpx2

from ops.soak.following import Follower, replayed_texts
from ops.soak.observations import ENDED, Sighting
from ops.soak.plans import Plan

#: Between two tries while the API is away.
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.4)
#: Much longer than the heartbeat comments of a silent stream.
_SILENCE_S: Final = 30.0
#: What a server answers that is stopping, or has no Redis: the same request is right again later.
_AGAIN: Final = frozenset({502, 503, 504})
_JOB_ERRORS: Final = frozenset({"cancelled", "deadline_exceeded", "worker_died", "engine_error", "claims_exhausted"})
_LONG_POLL_S: Final = 5
_REPLAYS: Final = 0.15


class _OutOfPatience(Exception):
    """No answer within the patience of a client."""


class _Unknown(Exception):
    """A request without a key was sent and not answered, so nobody may send it again.

    `left` where the client hung up: if the server died, it cancels nothing.
    """

    def __init__(self, *, left: bool) -> None:
        super().__init__("no answer")
        self.left = left


class Client:
    """Carries plans out, one after the other.

    Args:
        patience_s: how long it goes on trying to get an answer.
        on_resumed: called with the seconds from a break of a stream, which the client did not make, to its next token.
    """

    def __init__(
        self, http: httpx2.AsyncClient, draw: random.Random, patience_s: float, on_resumed: Callable[[float], None]
    ) -> None:
        self._http = http
        self._draw = draw
        self._patience_s = patience_s
        self._on_resumed = on_resumed

    async def run(self, sighting: Sighting) -> None:
        """Carry out the plan of `sighting`; what is seen is noted there as it is seen."""
        try:
            async with asyncio.timeout(sighting.plan.leave_after_s):
                await self._run(sighting.plan, sighting)
            if sighting.status and self._draw.random() < _REPLAYS:
                await self._replay(sighting)
        except TimeoutError:
            sighting.left = True
        except _Unknown as unknown:
            sighting.left = unknown.left
        except _OutOfPatience as error:
            sighting.gave_up = str(error)

    async def _run(self, plan: Plan, sighting: Sighting) -> None:
        if plan.way == "generate_stream":
            await self._post_stream(plan, sighting)
        elif plan.way in ("basic_generate", "generate"):
            await self._post_and_wait(plan, sighting)
        elif (await self._post(plan, sighting)).status_code == 202:
            for _ in range(plan.resends):
                await self._post(plan, sighting)
            await (self._follow(sighting) if plan.way == "stream" else self._poll(plan, sighting))

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, *, is_safe: bool = True, **more: Any) -> httpx2.Response:
        """A final answer. What is not safe to send twice is sent again only where it never left.

        Raises:
            _OutOfPatience: none came.
            _Unknown: it was sent, is not safe, and no answer came.
        """
        until = time.monotonic() + self._patience_s
        pauses = iter(_RETRY_S)
        seen = ""
        while time.monotonic() < until:
            try:
                answer = await self._http.request(method, path, **more)
            except httpx2.TransportError as error:
                if not is_safe and not isinstance(error, httpx2.ConnectError):
                    raise _Unknown(left=isinstance(error, httpx2.TimeoutException)) from error
                seen = repr(error)
            else:
                if answer.status_code not in _AGAIN or _is_of_job(answer):
                    return answer
                if not is_safe and "x-carpool-job-id" in answer.headers:
                    raise _Unknown(left=False)
                seen = f"{answer.status_code} {answer.text}"
            await asyncio.sleep(next(pauses, _RETRY_S[-1]))
        raise _OutOfPatience(f"{method} {path}: {seen}")

    async def _post(self, plan: Plan, sighting: Sighting) -> httpx2.Response:
        """Ask for the job; with a key, until there is an answer."""
        answer = await self._call("POST", plan.path, is_safe=bool(plan.key), json=plan.body, headers=plan.headers)
        _note_id(sighting, answer)
        if answer.status_code not in (200, 202) and not _is_of_job(answer):
            sighting.faults.append(("wrong", f"POST {plan.path} was answered {answer.status_code}: {answer.text}"))
        return answer

    async def _post_and_wait(self, plan: Plan, sighting: Sighting) -> None:
        """A synchronous request: its answer is the text, or why there is none."""
        posts = [asyncio.create_task(self._post(plan, sighting)) for _ in range(1 + plan.resends)]
        aside = asyncio.create_task(self._cancel_from_aside(plan, sighting))
        try:
            answer = (await asyncio.gather(*posts))[0]
        finally:
            for task in (*posts, aside):
                task.cancel()
            await asyncio.gather(*posts, aside, return_exceptions=True)
        body = answer.json()
        if answer.status_code == 200:
            texts = body["generated_texts"] if plan.way == "generate" else [body["generated_text"]]
            sighting.texts = [text.removeprefix(part.prompt) for text, part in zip(texts, plan.parts, strict=True)]
            sighting.status = "succeeded"
        else:
            sighting.status = {409: "cancelled", 504: "expired"}.get(answer.status_code, "failed")
        sighting.ended_at = time.time()

    async def _cancel_from_aside(self, plan: Plan, sighting: Sighting) -> None:
        """Cancel the job of a synchronous request, which somebody else finds in the list."""
        if plan.cancel_after is None:
            return
        await asyncio.sleep(self._draw.uniform(0.0, 1.0))
        page = (await self._call("GET", "/jobs", params={"limit": "50"})).json()
        for job in page["data"]:
            if job["seed"] == plan.seed:
                await self._cancel(str(job["id"]), sighting)

    async def _cancel(self, id: str, sighting: Sighting) -> None:
        sighting.asked_to_cancel = True
        answer = await self._call("POST", f"/jobs/{id}/cancel")
        if answer.status_code not in (200, 202):
            sighting.faults.append(("lost", f"its cancel was answered {answer.status_code}: {answer.text}"))

    async def _poll(self, plan: Plan, sighting: Sighting) -> None:
        id = sighting.ids[0]
        if plan.cancel_after is not None:
            await asyncio.sleep(self._draw.uniform(0.0, 1.0))
            await self._cancel(id, sighting)
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            answer = await self._call("GET", f"/jobs/{id}", params={"wait": str(_LONG_POLL_S)})
            if answer.status_code != 200:
                sighting.faults.append(("lost", f"GET /jobs/{id} was answered {answer.status_code}: {answer.text}"))
                return
            view = answer.json()
            if view["status"] in ENDED:
                sighting.status, sighting.texts, sighting.ended_at = view["status"], [view["text"]], time.time()
                return
        raise _OutOfPatience(f"GET /jobs/{id}: it is {view['status']}")

    # --- following --------------------------------------------------------------------------------------------------

    async def _post_stream(self, plan: Plan, sighting: Sighting) -> None:
        """A POSTed stream; where it breaks, it is posted again, or taken up at the job's own stream."""
        follower = Follower(sighting, self._draw, self._on_resumed)
        follower.may_cut = bool(plan.key)
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until and not sighting.ids:
            try:
                async with self._http.stream(
                    "POST", plan.path, json=plan.body, headers=plan.headers, timeout=_SILENCE_S
                ) as response:
                    _note_id(sighting, response)
                    if response.status_code == 200:
                        await follower.take(response)
                        break
                    await response.aread()
                    if response.status_code not in _AGAIN:
                        what = f"POST {plan.path} was answered {response.status_code}: {response.text}"
                        sighting.faults.append(("wrong", what))
                        return
                    if not plan.key and "x-carpool-job-id" in response.headers:
                        raise _Unknown(left=False)
            except httpx2.TransportError as error:
                if not plan.key and not isinstance(error, httpx2.ConnectError):
                    sighting.left = isinstance(error, httpx2.TimeoutException)
                    if not sighting.ids:
                        raise _Unknown(left=sighting.left) from error
                follower.broken()
            await asyncio.sleep(_RETRY_S[-1])
        if not sighting.ids:
            raise _OutOfPatience(f"POST {plan.path}")
        await self._follow(sighting, follower)

    async def _follow(self, sighting: Sighting, follower: Follower | None = None) -> None:
        """Follow a job's own stream to its end, through all cuts."""
        follower = follower or Follower(sighting, self._draw, self._on_resumed)
        follower.may_cut = True
        id = sighting.ids[0]
        until = time.monotonic() + self._patience_s
        while not sighting.status:
            if time.monotonic() > until:
                raise _OutOfPatience(f"the stream of {id} stands still at token {sighting.have}")
            have = sighting.have
            if follower.wants_to_cancel:
                await self._cancel(id, sighting)
            headers = {"Last-Event-ID": str(have)} if have else {}
            try:
                async with self._http.stream(
                    "GET", f"/jobs/{id}/stream", headers=headers, timeout=_SILENCE_S
                ) as response:
                    if response.status_code == 200:
                        await follower.take(response)
                    elif response.status_code not in _AGAIN:
                        await response.aread()
                        what = f"its stream was answered {response.status_code}: {response.text}"
                        sighting.faults.append(("lost", what))
                        return
                    else:
                        await asyncio.sleep(_RETRY_S[-1])
            except httpx2.TransportError:
                follower.broken()
                await asyncio.sleep(_RETRY_S[0])
            if sighting.have > have:
                until = time.monotonic() + self._patience_s

    async def _replay(self, sighting: Sighting) -> None:
        """After its end, the whole stream from its first event on."""
        id, plan = sighting.ids[0], sighting.plan
        ids = [f"{id}.{i}" for i in range(len(plan.parts))] if plan.way == "generate" else [id]
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            try:
                async with self._http.stream("GET", f"/jobs/{id}/stream", timeout=_SILENCE_S) as response:
                    if response.status_code == 200:
                        texts = await replayed_texts(response, ids)
                        if texts is not None:
                            if sighting.texts is not None and texts != sighting.texts:
                                sighting.faults.append(("gapped", f"its replay is {texts}, it was {sighting.texts}"))
                            return
            except httpx2.TransportError:
                pass  # as all that is not the end: from the start again
            await asyncio.sleep(_RETRY_S[-1])
        raise _OutOfPatience(f"the replay of {id}")


def _note_id(sighting: Sighting, answer: httpx2.Response) -> None:
    """What an answer says of its job; one of 503 names a job that may not be accepted."""
    id = answer.headers.get("x-carpool-job-id")
    if not id or answer.status_code == 503:
        return
    if sighting.accepted_at is None:
        sighting.accepted_at = time.time()
    if id not in sighting.ids:
        sighting.ids.append(id)


def _is_of_job(answer: httpx2.Response) -> bool:
    """Whether an error is the end of the job that was asked for, and not of this try."""
    if answer.status_code not in (409, 500, 504) or "x-carpool-job-id" not in answer.headers:
        return False
    return str(answer.json()["error"]["code"]) in _JOB_ERRORS
