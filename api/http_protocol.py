"""uvicorn's HTTP protocol with bounds on a request's arrival: the size of its head, and how long it may take.

The parser keeps a head in memory until it is complete, and a connection in the middle of a request is never idle to
uvicorn: without these bounds one client could hold any amount of memory, and many could hold all connections.
"""

from __future__ import annotations

import json
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tasks.codes import CarpoolError
from tasks.settings import Settings

#: Bytes of request line and headers.
_MAX_HEAD_BYTES: Final = 64 * 1024


def http_protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """The protocol for uvicorn's configuration."""

    class BoundedHttpProtocol(HttpToolsProtocol):
        """A head has `receive_timeout_s` to arrive; a body may take any time, but not be silent for so long."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._in_head = False
            self._in_body = False
            self._head_bytes = 0
            self._num_begun = 0
            self._heard_at = 0.0
            self._timer: TimerHandle | None = None

        def data_received(self, data: bytes) -> None:
            was_in_body, self._num_begun = self._in_body, 0
            self._heard_at = self.loop.time()
            super().data_received(data)
            # what came with the end of the request before is not counted: it is one read at most
            if self._in_head and not was_in_body and self._num_begun <= 1:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._refuse(
                        "head_too_large",
                        f"the request's head is longer than {_MAX_HEAD_BYTES} bytes: send fewer or shorter headers",
                    )

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_arrived()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._num_begun += 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(settings.receive_timeout_s, self._check)

        def on_headers_complete(self) -> None:
            self._in_head, self._in_body = False, True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._has_arrived()
            super().on_message_complete()

        def _has_arrived(self) -> None:
            self._in_head = self._in_body = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _check(self) -> None:
            """A head is late, or a body may be silent."""
            left_s = 0.0
            if self._in_body:
                # what we do not read yet is not the client's silence
                heard_at = self.loop.time() if self.flow.read_paused else self._heard_at
                left_s = heard_at + settings.receive_timeout_s - self.loop.time()
            if left_s > 0:
                self._timer = self.loop.call_later(left_s, self._check)
                return
            self._refuse(
                "request_timeout",
                f"the request did not arrive within {settings.receive_timeout_s:g} s (CARPOOL_RECEIVE_TIMEOUT_S): "
                "send it again",
            )

        def _refuse(self, code: str, message: str) -> None:
            """Answer, where nothing of an answer is on its way, and close the connection."""
            self._has_arrived()
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                error = CarpoolError(code, message)
                status = HTTPStatus(error.code.status)
                body = json.dumps({"error": error.body()}).encode()
                head = (
                    f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                )
                self.transport.write(head.encode() + body)
            self.transport.close()

    return BoundedHttpProtocol
