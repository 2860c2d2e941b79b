"""uvicorn's HTTP protocol with a bound on how long a request may take to arrive.

A connection in the middle of a request is never idle to uvicorn: without this, clients that send half a request could
hold all connections. h11 itself bounds what is kept of a head, of chunk headers and of trailers.
"""

from __future__ import annotations

import json
import sys
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasks.codes import CarpoolError
from tasks.settings import Settings

#: Most bytes of a head, or of a chunk's header or the trailers, that are kept while they are incomplete.
MAX_HEAD_BYTES: Final = 64 * 1024


def http_protocol(settings: Settings) -> type[H11Protocol]:
    """The protocol for uvicorn's configuration."""

    class BoundedProtocol(H11Protocol):
        """A head has `receive_timeout_s` to arrive; a body may take any time, but not be silent for so long."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._heard_at = 0.0
            self._timer: TimerHandle | None = None

        def data_received(self, data: bytes) -> None:
            self._heard_at = self.loop.time()
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()  # the beginning of the next request may be here already

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP gets an error like all others, unless an answer is on its way."""
            error = sys.exception()
            if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
                code, text = "head_too_large", f"the request's head is longer than {MAX_HEAD_BYTES} bytes"
            else:
                code, text = "invalid_http", f"the request is not HTTP ({error})"
            self._refuse(CarpoolError(code, f"{text}: send another one"))

        def _unsupported_upgrade_warning(self) -> None:
            """Clients that offer HTTP/2 get HTTP/1.1, and nobody has to know."""

        def _watch(self) -> None:
            if not self._is_arriving():
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(settings.receive_timeout_s, self._check)

        def _is_arriving(self) -> bool:
            state = self.conn.their_state
            return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _check(self) -> None:
            """A head is late, or a body may be silent."""
            self._timer = None
            if self.conn.their_state is h11.SEND_BODY:
                # what we do not read yet is not the client's silence
                heard_at = self.loop.time() if self.flow.read_paused else self._heard_at
                left_s = heard_at + settings.receive_timeout_s - self.loop.time()
                if left_s > 0:
                    self._timer = self.loop.call_later(left_s, self._check)
                    return
            self._refuse(
                CarpoolError(
                    "request_timeout",
                    f"the request did not arrive within {settings.receive_timeout_s:g} s "
                    "(CARPOOL_RECEIVE_TIMEOUT_S): send it again",
                )
            )

        def _refuse(self, error: CarpoolError) -> None:
            """Answer, where nothing of an answer is on its way, and close the connection."""
            self._stop_timer()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                status = HTTPStatus(error.code.status)
                body = json.dumps({"error": error.body()}).encode()
                head = (
                    f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                )
                self.transport.write(head.encode() + body)
            if self.cycle is not None and not self.cycle.response_complete:
                # whoever still writes an answer would write to a transport that is closed
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

    return BoundedProtocol
