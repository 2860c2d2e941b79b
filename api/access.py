"""Who may call: an API key where there are any, this machine alone where there are none. Plain ASGI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog
from redis.exceptions import RedisError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import static_page
from api.caller import Caller, headers_of_minute
from api.errors import answer, of_redis
from api.keyring import Keyring
from api.safety import host_name, is_loopback
from api.service import Service
from tasks.codes import CarpoolError

_log = structlog.get_logger("carpool.api")
#: All that is there for everybody, to be read: whether the process and what it needs are well, the files of the page
#: that asks for a key, and nothing more.
OPEN_PATHS: Final = frozenset({"/health/live", "/health/accepting", "/health/ready"}) | static_page.PATHS
#: Says that Redis is away, so it must answer then: to keys as they were when Redis was last asked, a second before.
_WITHOUT_REDIS: Final = frozenset({"/metrics"})
_READS: Final = frozenset({"GET", "HEAD"})


class Access:
    """Lets a request through with its caller (`api.caller.caller_of`), or answers 401.

    Args:
        allowed_hosts: further names that the Host header may have while there are no keys.
        any_host: something else keeps strangers out.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str], *, any_host: bool) -> None:
        self._app = app
        self._allowed = frozenset(name.rstrip(".").lower() for name in allowed_hosts)
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise TypeError(f"{scope['type']} is not served")
        headers = Headers(scope=scope)
        keyring = _keyring(scope)
        is_open = scope["method"] in _READS and path_of(scope) in OPEN_PATHS
        caller: Caller | None
        try:
            # whether this process is well must be told also while Redis hangs
            caller = keyring.peek(secret_in(headers)) if is_open or path_of(scope) in _WITHOUT_REDIS else None
            if caller is None and not is_open:
                caller = await keyring.admit(secret_in(headers))
            if not keyring.asks:
                self._check_host(headers)
        except CarpoolError as error:
            await answer(error, _headers_of_refusal(error, scope, headers))(scope, receive, send)
            return
        except RedisError as error:
            found = of_redis(error)
            if found.code.name == "internal_error":
                _log.error("redis_refused_a_call", path=scope["path"], exc_info=error)
            await answer(found, {"Connection": "close"})(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # of one who is let in anyhow: may it be told what is behind its answer?
        state["is_told_details"] = caller is not None or not keyring.asks
        if caller is None:
            await self._app(scope, receive, send)
            return
        state["caller"] = caller
        if caller.limits is None:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and caller.spent is not None:
                MutableHeaders(scope=message).update(headers_of_minute(caller.spent))
            await send(message)

        await self._app(scope, receive, send_with_limits)

    def _check_host(self, headers: Headers) -> None:
        """Only this machine is served by name, so that no web page can reach the API by DNS rebinding."""
        name = host_name(headers.get("host", ""))
        if self._any_host or is_loopback(name) or name.rstrip(".").lower() in self._allowed:
            return
        raise CarpoolError(
            "host_not_allowed",
            f"the Host header names {name[:80]!r}, and without API keys only this machine is served. Call "
            "http://127.0.0.1, add the name to CARPOOL_ALLOWED_HOSTS, or make a key: carpool keys create",
        )


def secret_in(headers: Headers) -> str:
    """The API key of a request: `Authorization: Bearer`, as OpenAI's clients send it, or `X-API-Key`; "" for none."""
    scheme, _, secret = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    return headers.get("x-api-key", "").strip()


def path_of(scope: Scope) -> str:
    """The path as the endpoints are found by it: without what a proxy serves this API under."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :]
    return path


def _keyring(scope: Scope) -> Keyring:
    service = scope["app"].state.service
    if not isinstance(service, Service):
        raise TypeError("the application serves only within its lifespan")
    return service.keyring


def _headers_of_refusal(error: CarpoolError, scope: Scope, headers: Headers) -> dict[str, str]:
    more = {}
    if error.code.status == 401:
        more["WWW-Authenticate"] = 'Bearer realm="carpool"' + (', error="invalid_token"' if secret_in(headers) else "")
    if scope["method"] not in _READS:
        more["Connection"] = "close"  # the body is not read
    return more
