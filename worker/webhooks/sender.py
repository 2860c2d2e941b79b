"""One POST to a receiver that a stranger named: one time bound, and only to an address that was looked at.

The name is resolved once, every address it has is checked, and the connection goes to one of these very addresses: a
name that means something else a moment later changes nothing. Redirects are not followed, proxies of the environment
not used, and what the receiver sends is bounded.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import h11

from tasks.webhook_addresses import refusal
from tasks.webhook_urls import WebhookUrl
from worker.webhooks.resolver import SocketAddress, resolve

#: Most bytes of a head, and of what of a body is read so that the receiver sees its answer taken.
MAX_HEAD_BYTES: Final = 16 * 1024
_MAX_BODY_BYTES: Final = 16 * 1024
_BODY_S: Final = 1.0
_CONNECT_S: Final = 5.0
_MOST_ADDRESSES: Final = 4
_PIECE: Final = 64 * 1024


class DeliveryError(Exception):
    """Nobody answered. The message is for the user, and names no address: it would tell of a network behind a name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver answered with; `retry_after` is the header as it came, "" without one."""

    status_code: int
    retry_after: str


class _Deadline:
    """Seconds that are left of one bound on everything."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self, most_s: float | None = None) -> float:
        """Raises DeliveryError when nothing is left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeliveryError(f"timeout: no answer within {self._seconds:g} s")
        return left if most_s is None else min(left, most_s)


class Sender:
    """Sends; safe to be used by many threads at once.

    Args:
        timeout_s: of name, connection, request and answer together.
        find: gives a name's addresses; tests put one of their own here.
        tls: the context for https; by default the system's authorities are trusted (`SSL_CERT_FILE` names others).
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        allow_private: bool,
        find: Callable[[str, int, float], Sequence[SocketAddress]] = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._allow_private = allow_private
        self._find = find
        self._tls = tls or ssl.create_default_context()
        self._tls.set_alpn_protocols(["http/1.1"])

    def post(self, url: WebhookUrl, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """Send a body and return how it was answered.

        Raises:
            DeliveryError: it was not answered.
        """
        deadline = _Deadline(self._timeout_s)
        addresses = self._addresses(url, deadline)
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(self._connect(addresses, deadline))
            if url.scheme == "https":
                connection = stack.enter_context(self._secured(connection, url.host, deadline))
            try:
                return _exchange(connection, url, headers, body, deadline)
            except TimeoutError:
                raise DeliveryError(f"timeout: no answer within {self._timeout_s:g} s") from None
            except h11.RemoteProtocolError:
                raise DeliveryError("protocol: the answer is not HTTP/1.1, or its head is too long") from None
            except OSError as error:
                raise DeliveryError(f"connection_lost: {_reason(error)}") from None

    def _addresses(self, url: WebhookUrl, deadline: _Deadline) -> Sequence[SocketAddress]:
        try:
            found = self._find(url.host, url.port, deadline.left())
        except TimeoutError:
            raise DeliveryError("dns: the name was not resolved in time") from None
        except (OSError, UnicodeError) as error:
            raise DeliveryError(f"dns: the name cannot be resolved ({_reason(error)})") from None
        if not found:
            raise DeliveryError("dns: the name has no address")
        for address in found:
            what = refusal(ipaddress.ip_address(address.host), allow_private=self._allow_private)
            if what is not None:
                raise DeliveryError(f"address_refused: the host has a {what} address, and webhooks go to public ones")
        return _both_families(found)[:_MOST_ADDRESSES]

    def _connect(self, addresses: Sequence[SocketAddress], deadline: _Deadline) -> socket.socket:
        reason = ""
        for address in addresses:
            connection = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            try:
                connection.settimeout(deadline.left(_CONNECT_S))
                connection.connect(address.sockaddr)
            except TimeoutError:
                reason = "no connection in time"
            except OSError as error:
                reason = _reason(error)
            except BaseException:
                connection.close()
                raise
            else:
                return connection
            connection.close()
        raise DeliveryError(f"connect: {reason}")

    def _secured(self, connection: socket.socket, host: str, deadline: _Deadline) -> ssl.SSLSocket:
        connection.settimeout(deadline.left())
        try:
            return self._tls.wrap_socket(connection, server_hostname=host.rstrip("."))
        except ssl.SSLCertVerificationError as error:
            raise DeliveryError(f"tls: {error.verify_message}") from None
        except TimeoutError:
            raise DeliveryError(f"timeout: no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise DeliveryError(f"tls: {_reason(error)}") from None


def _both_families(found: Sequence[SocketAddress]) -> list[SocketAddress]:
    """In turn one of each family, in the resolver's order: where one of them leads nowhere, the other is soon tried."""
    first = [address for address in found if address.family is found[0].family]
    second = [address for address in found if address.family is not found[0].family]
    pairs = itertools.zip_longest(first, second)
    return [address for pair in pairs for address in pair if address is not None]


def _exchange(
    connection: socket.socket, url: WebhookUrl, headers: Sequence[tuple[str, str]], body: bytes, deadline: _Deadline
) -> Answer:
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    request = h11.Request(
        method="POST",
        target=url.target,
        headers=[
            ("Host", url.host_header),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *headers,
        ],
    )
    parts = [http.send(request), http.send(h11.Data(data=body)), http.send(h11.EndOfMessage())]
    _send(connection, b"".join(part for part in parts if part), deadline)
    while True:
        event = _next_event(connection, http, deadline)
        if isinstance(event, h11.Response):
            found = dict(event.headers)
            answer = Answer(event.status_code, found.get(b"retry-after", b"").decode("ascii", "replace").strip())
            _read_a_little(connection, http)
            return answer


def _send(connection: socket.socket, data: bytes, deadline: _Deadline) -> None:
    left = memoryview(data)
    while left:
        connection.settimeout(deadline.left())
        left = left[connection.send(left[:_PIECE]) :]


def _next_event(connection: socket.socket, http: h11.Connection, deadline: _Deadline) -> Any:
    while (event := http.next_event()) is h11.NEED_DATA:
        connection.settimeout(deadline.left())
        data = connection.recv(8192)
        if not data:
            raise DeliveryError("connection_lost: the receiver closed the connection without an answer")
        http.receive_data(data)
    return event


def _read_a_little(connection: socket.socket, http: h11.Connection) -> None:
    """The answer is known by now; a receiver whose body is not read at all would see a broken connection."""
    deadline = _Deadline(_BODY_S)
    num_bytes = 0
    with contextlib.suppress(OSError, h11.RemoteProtocolError, DeliveryError):
        while num_bytes < _MAX_BODY_BYTES:
            event = _next_event(connection, http, deadline)
            if not isinstance(event, h11.Data):
                return
            num_bytes += len(event.data)


def _reason(error: Exception) -> str:
    """Why, in the system's words, without the name or address that they may go with."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the handshake failed").lower().replace("_", " ")
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror.lower() if strerror else "it is no name"
