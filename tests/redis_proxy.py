"""A TCP proxy before Redis that can be cut: one process loses touch while all others go on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Self


class RedisProxy:
    """Forwards a loopback port to a Redis server, until it is cut, and again once it is mended."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redis-proxy")
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        """Close what is open, and close whatever is opened."""
        self._call(self._cut)

    def mend(self) -> None:
        self._is_cut = False

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._forward, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._call(self._server.close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, function: object) -> None:
        async def run() -> None:
            function()  # type: ignore[operator]
            await asyncio.sleep(0.05)  # whoever was cut ends

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        both = {writer, server_writer}
        self._writers |= both
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        finally:
            self._writers -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
