"""Many requests at the same moment, each on a connection of its own, by a client that hardly needs the processor."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds`: from the moment at which all were sent."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    seconds: float


def burst(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Post them all at once; the connections are open before the first is sent."""
    return asyncio.run(_burst(url, path, bodies))


async def _burst(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port
    connections = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in bodies))
    started = time.monotonic()

    async def call(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: dict[str, Any]) -> Answer:
        reader, writer = connection
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        raw = await asyncio.wait_for(reader.read(), 30)
        seconds = time.monotonic() - started
        writer.close()
        top, _, content = raw.partition(b"\r\n\r\n")
        status, *lines = top.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return Answer(int(status.split(" ")[1]), headers, json.loads(content), seconds)

    return await asyncio.gather(*map(call, connections, bodies))
