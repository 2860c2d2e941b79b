"""HTTP/1.1 for clients that measure: bytes are stamped as they come and understood later, so that one core can follow
many streams without delaying the stamps of the others.

One connection carries one exchange at a time and is kept alive where the server lets it be (RFC 9112).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Self
from urllib.parse import urlsplit

from ops.bench.http_body import BadAnswerError, Body, Head, UntilClose, body_of
from ops.errors import ExitCode, OperationError

_MOST_HEAD_BYTES: Final = 65536
_MOST_BODY_BYTES: Final = 64 * 2**20
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class CutError(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Attributes:
        base: what its paths begin with, "" or "/…" without a slash at the end.
    """

    host: str
    port: int
    is_tls: bool
    base: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises OperationError for what is no http:// or https:// URL, and for one with a password in it."""
        fix = "Give it as http://host:port or https://host"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise OperationError(f"The URL {url!r} cannot be read: {error}", fix, ExitCode.USAGE) from error
        if parts.username is not None or parts.password is not None:
            # not repeated: it would stand in a log
            raise OperationError(
                f"The URL of {parts.hostname} has a user or a password in it", "Leave them out", ExitCode.USAGE
            )
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.query or parts.fragment:
            raise OperationError(f"The URL {url!r} is none of an API", fix, ExitCode.USAGE)
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or _DEFAULT_PORTS[parts.scheme], is_tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"


class Exchange:
    """One request, and what has come of its answer.

    Attributes:
        started: when the request was sent, as of `time.perf_counter`.
        pieces: the body as it came, without transfer coding.
        times: when each piece came, as of `time.perf_counter`.
        got_bytes: whether anything came at all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.started = time.perf_counter()
        self.pieces: list[bytes] = []
        self.times = array("d")
        self.got_bytes = False
        self.has_ended = False
        self._head: Head | None = None
        self._error: CutError | BadAnswerError | None = None
        self._head_is_here: asyncio.Future[None] = loop.create_future()
        self._is_over: asyncio.Future[None] = loop.create_future()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    async def head(self) -> Head:
        """Wait for the head. Raises CutError or BadAnswerError."""
        await asyncio.shield(self._head_is_here)
        if self._head is None:
            raise self._error or CutError("no answer")
        return self._head

    async def end(self) -> None:
        """Wait for the end of the body. Raises CutError or BadAnswerError; what came before it stays readable."""
        await asyncio.shield(self._is_over)
        if self._error is not None:
            raise self._error

    def set_head(self, head: Head) -> None:
        self._head = head
        if not self._head_is_here.done():
            self._head_is_here.set_result(None)

    def finish(self, error: CutError | BadAnswerError | None = None) -> None:
        self.has_ended = True
        self._error = error
        for future in (self._head_is_here, self._is_over):
            if not future.done():
                future.set_result(None)


class WireConnection(asyncio.Protocol):
    """One connection to a server; close it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._head = b""
        self._body: Body | None = None
        self._keeps_alive = True
        self._size = 0
        self._closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, address: Address) -> Self:
        """Connect. Raises OSError (with its TLS kinds), and nothing else; bound it with a timeout."""
        loop = asyncio.get_running_loop()
        context = _tls_context() if address.is_tls else None
        _, connection = await loop.create_connection(
            lambda: cls(address), address.host, address.port, ssl=context, server_hostname=None
        )
        return connection

    @property
    def is_free(self) -> bool:
        """Whether another exchange can begin."""
        return self._transport is not None and self._keeps_alive and self._exchange is None

    def begin(self, method: str, path: str, headers: Mapping[str, str], payload: bytes = b"") -> Exchange:
        """Send a request. One must not be under way; `path` is below the address's base."""
        if self._transport is None or not self.is_free:
            raise RuntimeError("the connection is not free")
        lines = [f"{method} {self._address.base}{path} HTTP/1.1", f"Host: {self._address.host_header}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if payload or method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        exchange = self._exchange = Exchange(asyncio.get_running_loop())
        self._head, self._body, self._size = b"", None, 0
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + payload)
        return exchange

    def close(self) -> None:
        """Give the connection up, at once; an exchange under way is cut."""
        if self._transport is not None:
            self._transport.abort()
            self._lost(CutError("closed by this client"))

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        exchange = self._exchange
        if exchange is None:
            self.close()  # nobody has asked for it
            return
        exchange.got_bytes = True
        try:
            if self._body is None:
                data = self._take_head(exchange, data)
                if self._body is None:
                    return
            piece = self._body.feed(data)
            if piece:
                self._size += len(piece)
                if self._size > _MOST_BODY_BYTES:
                    raise BadAnswerError(f"an answer of more than {_MOST_BODY_BYTES >> 20} MiB")
                exchange.pieces.append(piece)
                exchange.times.append(now)
        except BadAnswerError as error:
            self._fail(error)
            return
        if self._body.has_ended:
            self._keeps_alive = self._keeps_alive and not self._body.rest
            self._exchange = None
            exchange.finish()

    def eof_received(self) -> bool:
        self._lost(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(CutError(f"the connection was lost: {exc}") if exc else None)
        if not self._closed.done():
            self._closed.set_result(None)

    def _take_head(self, exchange: Exchange, data: bytes) -> bytes:
        """Returns what of `data` is body."""
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = Head.parse(self._head[:end]), self._head[end + 4 :]
            self._head = rest
            if head.status // 100 == 1:
                continue
            self._body = body_of(head)
            self._keeps_alive = head.keeps_alive and not isinstance(self._body, UntilClose)
            exchange.set_head(head)
            return rest
        if len(self._head) > _MOST_HEAD_BYTES:
            raise BadAnswerError("a head without an end")
        return b""

    def _fail(self, error: BadAnswerError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.finish(error)
        self.close()

    def _lost(self, error: CutError | None) -> None:
        self._transport = None
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        is_whole = error is None and isinstance(self._body, UntilClose)
        exchange.finish(None if is_whole else error or CutError("the server closed the connection"))


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()
