"""One request, measured: from its submission to the last event, and what became of it where it failed."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from ops.bench.event_parser import EventParser
from ops.bench.http_body import BadAnswerError, Head
from ops.bench.http_client import DONE
from ops.bench.http_wire import CutError, Exchange, WireConnection
from ops.bench.serving.target import NETWORK_ERRORS, Target

#: So many pieces are understood at a time, then the other streams have their turn.
_SLICE: Final = 32
#: A server that has said [DONE] may leave the connection open; nobody waits for it.
_AFTER_DONE_S: Final = 0.5
_RESUME_FIRST_S: Final = 0.05
_RESUME_LONGEST_S: Final = 1.0
_CANCEL_S: Final = 2.0
_LONGEST_DETAIL: Final = 200
_LONGEST_CODE: Final = 60
_UNFINISHED: Final = "unfinished"
_REFUSALS: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
#: A stream that is taken up again may meet a service that is not up again.
_AWAY: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are of `time.perf_counter`.

    Attributes:
        scheduled: when it was to be sent; in a closed loop when it was.
        started: when the client turned to it; connecting, where it had no open connection, comes after that.
        ended: when the last bytes came, or it was given up.
        arrivals: when each event with tokens came.
        tokens: of the answer: by the server's usage, else (`is_counted`) one an event.
        error: "" where the answer is whole, else a code.
        retry_after_s: of a refusal: how long the server asks to wait.
        resumes: how often its stream was cut and taken up again.
        queue_s: how long the job waited for a slot; None where the service does not tell.
        attempts: how many workers took it up; 0 where the service does not tell.
    """

    number: int
    scheduled: float
    started: float
    ended: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    is_counted: bool = False
    prompt_tokens: int | None = None
    error: str = _UNFINISHED
    detail: str = ""
    retry_after_s: float | None = None
    resumes: int = 0
    job_id: str = ""
    queue_s: float | None = None
    attempts: int = 0

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def is_unfinished(self) -> bool:
        """It was given up while nothing was wrong with it."""
        return self.error == _UNFINISHED

    @property
    def is_refused(self) -> bool:
        """The server said no, and when to come again."""
        return self.retry_after_s is not None


async def measure(target: Target, body: bytes, outcome: Outcome, timeout_s: float) -> None:
    """Send a request of this body and fill in what came of it; raises nothing but asyncio.CancelledError."""
    call = _Call(target, body, outcome)
    try:
        async with asyncio.timeout(timeout_s):
            await call.run()
    except TimeoutError as error:
        call.fail("timeout", str(error) or f"not done within {timeout_s:g} s")
    except CutError as error:
        call.fail("cut", str(error))
    except BadAnswerError as error:
        call.fail("bad_answer", str(error))
    except OSError as error:
        call.fail("connect", str(error))
    finally:
        outcome.ended = outcome.ended or time.perf_counter()
        call.take_tokens()
        call.close()
    if outcome.error in ("timeout", "cut") and target.endpoint == "jobs":
        await _cancel(target, outcome.job_id)


async def cancel_unfinished(target: Target, outcome: Outcome) -> None:
    """Free the slot of a job that nobody waits for any more; a completion ends with its connection."""
    if outcome.is_unfinished and target.endpoint == "jobs":
        await _cancel(target, outcome.job_id)


async def _cancel(target: Target, job_id: str) -> None:
    if not job_id:
        return
    try:
        async with asyncio.timeout(_CANCEL_S):
            connection, _ = await target.connect()
            try:
                exchange = connection.begin("POST", f"/jobs/{job_id}/cancel", target.headers)
                await exchange.end()
            finally:
                target.release(connection)
    except NETWORK_ERRORS:
        return  # it ends by itself: nothing is left to tell


class _Call:
    def __init__(self, target: Target, body: bytes, outcome: Outcome) -> None:
        self._target = target
        self._body = body
        self._outcome = outcome
        self._reader = target.reader()
        self._connection: WireConnection | None = None

    async def run(self) -> None:
        exchange = await self._submit()
        head = await exchange.head()
        self._outcome.job_id = head.headers.get("x-carpool-job-id", "")
        if self._target.endpoint == "jobs":
            await exchange.end()
            if head.status != HTTPStatus.ACCEPTED:
                self._refused(head, exchange)
                return
            self._outcome.job_id = _job_id(exchange.body)
            await self._follow()
        elif head.status != HTTPStatus.OK:
            await exchange.end()
            self._refused(head, exchange)
            return
        elif head.media_type != "text/event-stream":
            await exchange.end()
            self.fail("no_stream", f"200 with {head.media_type or 'no content type'} instead of an event stream")
            return
        else:
            await self._read(exchange, EventParser())
        self._settle()

    def fail(self, code: str, detail: str) -> None:
        # a stranger's words end up on a terminal
        self._outcome.error = _printable(code)[:_LONGEST_CODE]
        self._outcome.detail = _printable(detail)[:_LONGEST_DETAIL]

    def take_tokens(self) -> None:
        """What the reader has counted so far is the outcome's, however the request ended."""
        reader, outcome = self._reader, self._outcome
        outcome.arrivals = reader.arrivals
        outcome.is_counted = reader.tokens is None
        outcome.tokens = len(reader.arrivals) if reader.tokens is None else reader.tokens
        outcome.prompt_tokens = reader.prompt_tokens

    def close(self) -> None:
        if self._connection is not None:
            self._target.release(self._connection)
            self._connection = None

    async def _submit(self) -> Exchange:
        """Send the request; once more where a connection that was kept alive turns out to have been closed before."""
        self._connection, was_used = await self._target.connect()
        exchange = self._connection.begin("POST", self._target.path, self._target.headers, self._body)
        try:
            await exchange.head()
        except CutError:
            if not was_used or exchange.got_bytes:
                raise
            self.close()
            self._connection, _ = await self._target.connect()
            exchange = self._connection.begin("POST", self._target.path, self._target.headers, self._body)
        return exchange

    async def _follow(self) -> None:
        """Read a job's stream, and take it up again wherever it is cut; the timeout bounds that."""
        outcome, cursor, pause = self._outcome, "", _RESUME_FIRST_S
        while True:
            parser = EventParser()
            try:
                if self._connection is None or not self._connection.is_free:
                    self.close()
                    self._connection, _ = await self._target.connect()
                headers = {**self._target.headers, **({"Last-Event-ID": cursor} if cursor else {})}
                exchange = self._connection.begin("GET", f"/jobs/{outcome.job_id}/stream", headers)
                head = await exchange.head()
                if head.status == HTTPStatus.OK:
                    pause = _RESUME_FIRST_S
                    await self._read(exchange, parser)
                elif head.status not in _AWAY:
                    await exchange.end()
                    self._reader.fail(f"http_{head.status}", _shown(exchange.body))
            except (CutError, ConnectionError) as error:
                outcome.detail = str(error)
            cursor = parser.last_id or cursor
            if self._reader.is_whole or self._reader.error:
                return
            outcome.resumes += 1
            await asyncio.sleep(pause)  # the API is away: nothing tells when it is back
            pause = min(2 * pause, _RESUME_LONGEST_S)

    async def _read(self, exchange: Exchange, parser: EventParser) -> None:
        """Wait for the end of a stream, then understand it. Raises CutError where it was cut before its end."""
        cut: CutError | None = None
        try:
            await self._await_end(exchange)
        except CutError as error:
            cut = error
        except asyncio.CancelledError:
            # out of time: what came is read all the same, it is not much of a delay
            self._understand(exchange, parser, 0, len(exchange.pieces))
            raise
        self._outcome.ended = exchange.times[-1] if exchange.times else time.perf_counter()
        for start in range(0, len(exchange.pieces), _SLICE):
            self._understand(exchange, parser, start, start + _SLICE)
            await asyncio.sleep(0)
        if cut is None and exchange.times:
            self._take(parser.finish(), exchange.times[-1])
        if not self._reader.is_whole and not self._reader.error:
            raise cut or CutError("the stream ended before the answer did")

    async def _await_end(self, exchange: Exchange) -> None:
        """Until the body has ended, or [DONE] was said and the server holds the connection open."""
        seen, end = 0, asyncio.ensure_future(exchange.end())
        try:
            while not end.done():
                await asyncio.wait([end], timeout=_AFTER_DONE_S)
                is_quiet, seen = seen == len(exchange.pieces), len(exchange.pieces)
                if is_quiet and seen and not end.done() and b"".join(exchange.pieces[-2:]).rstrip().endswith(DONE):
                    return
            await end
        finally:
            end.cancel()

    def _understand(self, exchange: Exchange, parser: EventParser, start: int, stop: int) -> None:
        for at, piece in zip(exchange.times[start:stop], exchange.pieces[start:stop], strict=True):
            try:
                events = parser.feed(piece)
            except ValueError as error:
                self._reader.fail("bad_event", str(error))
                return
            self._take(events, at)

    def _take(self, events: list[bytes], at: float) -> None:
        for data in events:
            self._reader.take(data, at)

    def _settle(self) -> None:
        """What the reader has read is the outcome."""
        reader, outcome = self._reader, self._outcome
        if reader.error:
            self.fail(reader.error, reader.message)
        elif not reader.arrivals:
            self.fail("no_tokens", "the stream ended well, without a token")
        else:
            outcome.error = outcome.detail = ""

    def _refused(self, head: Head, exchange: Exchange) -> None:
        self.fail(f"http_{head.status}", _shown(exchange.body))
        retry_after = head.headers.get("retry-after", "")
        if head.status in _REFUSALS and retry_after.isascii() and retry_after.isdigit():
            self._outcome.retry_after_s = float(retry_after)


def _job_id(body: bytes) -> str:
    try:
        id = json.loads(body)["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadAnswerError(f"202 without a job: {_shown(body)}") from error
    return str(id)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _shown(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:_LONGEST_DETAIL].decode(errors="replace")
