"""The API as a process: checks what it stands on, listens, and ends so that clients can go on elsewhere."""

from __future__ import annotations

import resource
import signal
import socket
from types import FrameType
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI
from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, RedisError, TimeoutError

from api.app import create_app
from api.http_protocol import MAX_HEAD_BYTES, http_protocol
from api.safety import is_loopback
from api.service import Service
from tasks.api_keys import KeyStore
from tasks.codes import CarpoolError
from tasks.lifeline import watch_lifeline
from tasks.logs import configure_logging
from tasks.redis_clients import check_server, connect, redacted
from tasks.settings import Settings, SettingsError
from tasks.webhook_secrets import webhook_secrets

_log = structlog.get_logger("carpool.api")
#: Open streams end at once; this is for answers that are being written.
_GRACE_S: Final = 3
_MOST_FILES: Final = 65536
_BACKLOG: Final = 2048


class Server(uvicorn.Server):
    """Ends streams and waits first: uvicorn on its own would wait for them until its patience is over."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = getattr(self._app.state, "service", None)
        if isinstance(service, Service):
            service.stop()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then end within a few seconds, with exit code 0. Cancels no job.

    Raises:
        SettingsError: the host may not be served so, its port is taken, or a secret of webhooks is none.
        CarpoolError: the Redis server would lose jobs, or its ledger is of a newer release.
    """
    configure_logging(settings, "api")
    webhook_secrets(settings)
    raise_file_limit()
    check_redis(settings)
    check_host(settings, redis_may_be_away=True)
    app = create_app(settings)
    with listen(settings) as listener:
        # uvicorn raises the signal again once it has ended
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGINT, _end)
        watch_lifeline()
        server = Server(server_config(settings, app), app)
        host, port = listener.getsockname()[:2]
        _log.info("api_listens", host=host, port=port, redis=redacted(settings.redis_url))
        server.run([listener])


def check_host(settings: Settings, *, redis_may_be_away: bool = False) -> None:
    """Refuse a host that others reach while there is no API key. Nobody would be served there: every request needs one.

    Args:
        redis_may_be_away: where it cannot be asked for keys, that is none to refuse the start for.

    Raises:
        SettingsError: there is none.
    """
    if is_loopback(settings.host) or settings.allow_no_keys or settings.api_keys_file:
        return
    try:
        with connect(settings) as client:
            if KeyStore(client).table():
                return
            none = "there is no API key"
    except RedisError as error:
        if redis_may_be_away:
            _log.warning("keys_cannot_be_read", error=str(error))
            return
        none = f"no API key is known ({error})"
    raise SettingsError(
        f"CARPOOL_HOST={settings.host}: {none}, and without keys only this machine is served. Make one with carpool "
        "keys create, take CARPOOL_HOST=127.0.0.1, or set CARPOOL_ALLOW_NO_KEYS=1 if something else keeps strangers out"
    )


def check_redis(settings: Settings) -> None:
    """Refuse a server that would lose jobs. One that is away is waited for: /health/accepting says so meanwhile.

    Raises:
        CarpoolError: with the command that mends it.
    """
    with connect(settings) as client:
        try:
            check_server(client, settings.redis_url)
        except CarpoolError as error:
            cause = error.__cause__
            if isinstance(cause, AuthenticationError | AuthorizationError) or not isinstance(
                cause, ConnectionError | TimeoutError
            ):
                raise
            _log.warning("api_starts_without_redis", error=error.message)
        except RedisError as error:
            _log.warning("redis_takes_no_writes", error=str(error))


def raise_file_limit() -> None:
    """Each open stream is a file descriptor: take as many as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(settings: Settings) -> socket.socket:
    """A listening socket. Raises SettingsError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # with the protocol named: asyncio turns Nagle's algorithm off only where it sees TCP, and 40 ms are a token
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"CARPOOL_HOST={settings.host}, CARPOOL_PORT={settings.port}: cannot listen there ({error.strerror}). Take "
            "another port, or end what uses this one"
        ) from error
    return listener


def server_config(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves this application."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http=http_protocol(settings),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        proxy_headers=True,
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(0)
