"""The page at `/`: its files, which are read when the process starts, and what a browser may do with them."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Nothing but this server's own files: no inline script or style, no text that is taken for HTML, no other host.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # the file is asked for again each time, and mostly answered with 304: after an upgrade all parts fit together
    "Cache-Control": "no-cache",
}
_Endpoint = Callable[[Request], Awaitable[Response]]

router = APIRouter(include_in_schema=False)


def _endpoint(name: str, content: bytes) -> _Endpoint:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if etag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return serve


def _add_all() -> frozenset[str]:
    """A route for each file of the folder, and for no other; returns their paths."""
    paths = []
    for file in sorted((files("api") / "page").iterdir(), key=lambda one: one.name):
        if file.name.rpartition(".")[2] not in _TYPES:
            continue
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        router.add_api_route(path, _endpoint(file.name, file.read_bytes()), methods=["GET", "HEAD"])
        paths.append(path)
    return frozenset(paths)


#: What a browser may load before anybody has given it an API key: files, the same for everyone.
PATHS: Final = _add_all()
