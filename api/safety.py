"""What stands before every request, as plain ASGI: a name for the request, the bounds of a body.

Starlette's BaseHTTPMiddleware would hide from an endpoint that its client has left, so nothing here uses it.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import answer
from tasks.codes import CarpoolError

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
#: What a form has around its file.
_FORM_BYTES: Final = 64 * 1024
_JSON: Final = re.compile(r"application/(?:json|[a-z0-9!#$&^_.+-]+\+json)\s*(?:;.*)?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without its port and the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _authority(origin: str) -> str:
    """Host and port of an Origin header; "" where it has none."""
    return origin.partition("://")[2]


class RequestIds:
    """Takes over the caller's `x-request-id`, or makes one; it stands in every answer.

    Args:
        root_path: where a proxy serves the API, whether or not it takes that off the paths that it passes on.
        on_start: called with the request's scope and the status when its answer starts, or cannot.
    """

    def __init__(
        self, app: ASGIApp, root_path: str = "", on_start: Callable[[Scope, int], None] = lambda *_: None
    ) -> None:
        self._app = app
        self._on_start = on_start
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        if self._root_path:
            scope["root_path"] = self._root_path

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                scope["state"]["status"] = message["status"]  # for its trace
                self._on_start(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # answered further out, as an error of this server
            if not has_started:
                self._on_start(scope, 500)
            raise


class BodyCheck:
    """Bounds bodies, and takes JSON alone: a web page can't send that to another site without asking first (CORS).

    Args:
        uploads: paths that take a form with a file, and how many bytes of a file. A page could send a form to them, so
            that the Origin which browsers then name has to be this server's own, or one of `origins`.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, uploads: Mapping[str, int] | None = None, origins: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._uploads = uploads or {}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")).rstrip("/"))
        if scope["method"] == "POST" and path in self._uploads:
            await self._upload(scope, receive, send, headers, self._uploads[path] + _FORM_BYTES)
            return
        length = headers.get("content-length", "")
        error = None
        if length.isdecimal() and int(length) > self._max_bytes:
            error = CarpoolError("body_too_large", self._too_large(f"{length} bytes"))
        elif (length not in ("", "0") or "transfer-encoding" in headers) and not _JSON.fullmatch(
            headers.get("content-type", "")
        ):
            given = headers.get("content-type", "")[:80]
            error = CarpoolError(
                "unsupported_media_type",
                f"the body's Content-Type is {given!r}. Send JSON, with the header Content-Type: application/json",
            )
        if error is not None:
            # the body is not read: the connection is of no further use
            await answer(error, {"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send, headers: Headers, max_bytes: int) -> None:
        length, origin = headers.get("content-length", ""), headers.get("origin")
        error = None
        if origin is not None and origin not in self._origins and _authority(origin) != headers.get("host", ""):
            error = CarpoolError(
                "origin_not_allowed",
                f"a page of {origin[:80]!r} may not upload files here. Add it to CARPOOL_CORS_ORIGINS",
            )
        elif length.isdecimal() and int(length) > max_bytes:
            error = CarpoolError(
                "file_too_large",
                f"a file may have {max_bytes - _FORM_BYTES} bytes (CARPOOL_MAX_FILE_BYTES), and this form has "
                f"{length}. Split it",
                param="file",
            )
        if error is not None:
            await answer(error, {"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    # the one kind of error that passes through the reading of a body unchanged
                    raise HTTPException(413, self._too_large("longer"))
            return message

        return receive_bounded

    def _too_large(self, size: str) -> str:
        return f"a body may have {self._max_bytes} bytes (CARPOOL_MAX_BODY_BYTES), and this one is {size}. Send less"
