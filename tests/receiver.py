"""A receiver of webhooks: a real HTTP server on the loopback address that does what a test says."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks.webhooks import Webhook

BOUND_S = 30.0
#: Two secrets, as in a rotation.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_bm90LXRoZS1zYW1lLXNlY3JldC1hcy1iZWZvcmU="


@dataclass(frozen=True)
class Received:
    """One request."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers.get("webhook-id", "")

    def event(self, secret: str = SECRET) -> dict[str, Any]:
        """The event, its signature verified as a receiver would."""
        verified: dict[str, Any] = Webhook(secret).verify(self.body, self.headers)
        assert verified == json.loads(self.body)
        return verified


@dataclass(frozen=True)
class Reply:
    """How a request is answered. `before` is called first, and may block."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    before: Callable[[], object] | None = None


class Receiver:
    """Answers with `reply(number of the request of its event, the request)`."""

    def __init__(
        self, reply: Callable[[int, Received], Reply] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.reply = reply or (lambda number, request: Reply())
        self.requests: list[Received] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                received = Received(time.time(), self.path, headers, body)
                reply = receiver.reply(receiver._note(received), received)
                if reply.before is not None:
                    reply.before()
                with contextlib.suppress(OSError):  # who asked has given up, as some tests want
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(reply.body)))
                    self.end_headers()
                    self.wfile.write(reply.body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # connections that are cut are what some tests want

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="receiver")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(BOUND_S)

    def wait_for(self, count: int, bound_s: float = BOUND_S) -> list[Received]:
        """Until so many requests have come; returns them all."""
        return self.wait_until(lambda requests: len(requests) >= count, f"{count} requests", bound_s)

    def wait_until(
        self, holds: Callable[[list[Received]], bool], what: str, bound_s: float = BOUND_S
    ) -> list[Received]:
        """Until the requests are as wanted; returns them all."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.requests), bound_s), (
                f"not within {bound_s:g} s: {what}; {Counter(request.id for request in self.requests).most_common(3)}"
            )
            return list(self.requests)

    def _note(self, received: Received) -> int:
        with self._changed:
            self.requests.append(received)
            self._changed.notify_all()
            return sum(other.id == received.id for other in self.requests)


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that does with each connection what the test says; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        def handle(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(BOUND_S)
