"""The API in a test: a real uvicorn on a loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.server import Server, listen, server_config
from api.service import Service
from tasks.settings import Settings

BOUND_S = 20.0


@dataclass
class ApiServer:
    """A running API."""

    app: FastAPI
    url: str
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    def client(self, **options: Any) -> httpx2.Client:
        """A client of this server; close it."""
        return httpx2.Client(**{"base_url": self.url, "timeout": BOUND_S, "trust_env": False, **options})

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a plain function in the server's event loop, and return its result."""

        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(BOUND_S)


class _Server(Server):
    """Says when it listens."""

    def __init__(self, settings: Settings, app: FastAPI) -> None:
        super().__init__(server_config(settings, app), app)
        self.listens = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.listens.set()


@contextmanager
def running_api(settings: Settings) -> Iterator[ApiServer]:
    """Serve on a free port until the block ends."""
    app = create_app(settings)
    listener = listen(settings.model_copy(update={"port": 0}))
    server = _Server(settings, app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="api")
    thread.start()
    try:
        assert server.listens.wait(BOUND_S)
        assert server.loop is not None
        yield ApiServer(app, f"http://127.0.0.1:{listener.getsockname()[1]}", server, server.loop)
    finally:
        server.should_exit = True
        thread.join(BOUND_S)
        listener.close()
        assert not thread.is_alive()


@dataclass(frozen=True)
class Event:
    """One event of a stream, or one comment."""

    id: str = ""
    data: dict[str, Any] | None = None
    comment: str = ""


def events_of(response: httpx2.Response) -> Iterator[Event]:
    """The events and comments of an open stream, as the wire has them: strictly split at newlines alone."""
    id, data, comment, pending = "", "", "", ""
    for chunk in response.iter_bytes():
        pending += chunk.decode()
        while "\n" in pending:
            line, pending = pending.split("\n", 1)
            if line.startswith("id: "):
                id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif line.startswith(": "):
                comment = line[2:]
            elif line:
                raise AssertionError(f"a line that is no field of an event: {line!r}")
            else:
                yield Event(id, json.loads(data) if data else None, comment)
                id, data, comment = "", "", ""


def tokens_of(response: httpx2.Response) -> list[Event]:
    """All events of a stream, without the comments."""
    return [event for event in events_of(response) if event.data is not None]


def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    """Wait for something that tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)  # for states that no event announces
