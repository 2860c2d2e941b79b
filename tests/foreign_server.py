"""Servers that speak OpenAI's API without being ours: what they send is legal and odd, or fails, by the path they are
asked on (`<url>/crlf/v1/completions`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BOUND_S = 20.0
#: Tokens of every answer.
TOKENS = 12
#: Between two events.
STEP_S = 0.01


@dataclass
class Asked:
    """One request that came."""

    path: str
    body: dict[str, Any]
    authorization: str


@dataclass
class ForeignServer:
    """A running server, and what it was asked."""

    url: str
    asked: list[Asked] = field(default_factory=list)


def _chunk(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": None, **more}
    return {"id": "x", "object": "chunk", "choices": [choice]}


_USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": TOKENS, "total_tokens": TOKENS + 5}}


def _crlf() -> Iterator[bytes]:
    yield b"\xef\xbb\xbf: hello\r\n\r\n"
    for number in range(TOKENS):
        yield f"event: message\r\nid: {number}\r\ndata: {json.dumps(_chunk(' a'))}\r\n\r\n: ping\r\n\r\n".encode()
    yield f"data: {json.dumps(_chunk('', finish_reason='length'))}\r\n\r\ndata: {json.dumps(_USAGE)}\r\n\r\n".encode()
    yield b"data: [DONE]\r\n\r\n"


def _several() -> Iterator[bytes]:
    """Three tokens an event; no space behind the colon; the last blank line is missing."""
    for _ in range(TOKENS // 3):
        yield f"data:{json.dumps(_chunk(' a b c'))}\n\n".encode()
    yield f"data:{json.dumps({**_USAGE, **_chunk('', finish_reason='stop')})}\n\ndata:[DONE]\n".encode()


def _multiline() -> Iterator[bytes]:
    """JSON over many lines, each a data line of its own, ended by CR alone; the first delta has no text."""
    yield b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\r'
    for _ in range(TOKENS):
        lines = json.dumps(_chunk(" a"), indent=1).splitlines()
        yield ("".join(f"data: {line}\r" for line in lines) + "\r").encode()
    yield b"data: [DONE]\r\r"


def _torn() -> Iterator[bytes]:
    """Single bytes, and several events at once; it ends with a finish_reason and without [DONE]."""
    whole = b"".join(f"data: {json.dumps(_chunk(' a'))}\n\n".encode() for _ in range(TOKENS))
    for at in range(40):
        yield whole[at : at + 1]
    yield whole[40:] + f"data: {json.dumps(_chunk('', finish_reason='stop'))}\n\n".encode()


def _error() -> Iterator[bytes]:
    yield f"data: {json.dumps(_chunk(' a'))}\n\n".encode()
    yield b'event: error\ndata: {"error": {"message": "out of memory", "type": "server_error", "code": "oom"}}\n\n'


def _nonsense() -> Iterator[bytes]:
    yield b'data: {"choices": 7}\n\n'


def _deep() -> Iterator[bytes]:
    yield b"data: " + 100_000 * b"[" + b"\n\n"


def _rude() -> Iterator[bytes]:
    """Words that would move a terminal's cursor, and a number of tokens that is none."""
    yield b'data: {"error": {"code": "\\u001b[2Jgone", "message": "\\u001b]0;x\\u0007"}}\n\n'


def _infinite() -> Iterator[bytes]:
    yield b'data: {"choices": [], "usage": {"completion_tokens": Infinity}}\n\n'


def _silent() -> Iterator[bytes]:
    yield b"data: [DONE]\n\n"


_STREAMS: dict[str, Callable[[], Iterator[bytes]]] = {
    "crlf": _crlf,
    "several": _several,
    "multiline": _multiline,
    "torn": _torn,
    "error": _error,
    "nonsense": _nonsense,
    "silent": _silent,
    "deep": _deep,
    "rude": _rude,
    "infinite": _infinite,
}


async def _paced(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(STEP_S)  # the pace of a model


def _app(asked: list[Asked]) -> Starlette:
    async def models(request: Request) -> Response:
        if request.path_params["kind"] == "versionless":
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"object": "list", "data": [{"id": "their-model"}, {"id": "another"}]})

    async def versionless_models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "their-model"}]})

    async def generate(request: Request) -> Response:
        kind = request.path_params["kind"]
        body = await request.json()
        asked.append(Asked(request.url.path, body, request.headers.get("authorization", "")))
        match kind:
            case "busy":
                return JSONResponse({"error": {"code": "slow_down", "message": "later"}}, 429, {"Retry-After": "1"})
            case "down":
                return JSONResponse({"detail": "no"}, 503)
            case "broken":
                return Response("oh no", 500)
            case "whole":
                return JSONResponse(_chunk(" a b c"))
            case "strict" if "stream_options" in body:
                return JSONResponse({"error": {"code": "unknown_field", "message": "stream_options"}}, 400)
        pieces = _STREAMS.get(kind, _crlf if kind != "strict" else _torn)()
        return StreamingResponse(_paced(pieces), media_type="text/event-stream; charset=utf-8")

    return Starlette(
        routes=[
            Route("/{kind}/v1/models", models),
            Route("/{kind}/models", versionless_models),
            Route("/{kind}/v1/completions", generate, methods=["POST"]),
            Route("/{kind}/v1/chat/completions", generate, methods=["POST"]),
            Route("/{kind}/chat/completions", generate, methods=["POST"]),
        ]
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def foreign_server(certificate: str | None = None) -> Iterator[ForeignServer]:
    """Serve on a free port, over TLS with a certificate, until the block ends."""
    # asyncio turns Nagle's algorithm off only for sockets that say that they are TCP
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    scheme = "https" if certificate else "http"
    found = ForeignServer(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        _app(found.asked), log_level="error", ssl_certfile=certificate, ssl_keyfile=certificate, lifespan="off"
    )
    server = _Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="foreign-server")
    thread.start()
    try:
        assert server.listens.wait(BOUND_S)
        yield found
    finally:
        server.should_exit = True
        thread.join(BOUND_S)
        listener.close()
        assert not thread.is_alive()


_MODELS = b'{"data": [{"id": "raw-model"}]}'
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@contextmanager
def raw_server() -> Iterator[str]:
    """A server without a framework, which does to a connection what its path says; yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="raw-server")
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(BOUND_S)

    server: asyncio.Server = run(asyncio.start_server(_raw, "127.0.0.1", 0))

    async def end() -> None:
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        run(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BOUND_S)
        loop.close()


async def _raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0)
            await reader.readexactly(length)
            path = head.split(" ", 2)[1]
            if path.endswith("/models"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
            elif not await _answer(path.split("/")[1], reader, writer):
                break
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _answer(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection is kept."""
    event = f"data: {json.dumps(_chunk(' a'))}\n\n".encode()
    whole = event * TOKENS + b"data: [DONE]\n\n"
    match kind:
        case "close":  # the body ends with the connection
            writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + whole)
            return False
        case "sized":
            writer.write(_OK + b"Content-Length: %d\r\n\r\n%b" % (len(whole), whole))
            return True
        case "interim":  # a head that announces the real one
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"Transfer-Encoding: Chunked\r\n\r\n")
            writer.write(b"%x;a=b\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(whole), whole))
            return True
        case "stale":  # promises to keep the connection, and closes it
            writer.write(_OK + b"Content-Length: %d\r\n\r\n%b" % (len(whole), whole))
            return False
        case "held":  # says [DONE] and never ends
            writer.write(_OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(whole), whole))
            await writer.drain()
            await reader.read()  # until the client leaves
        case "cut":
            writer.write(_OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event))
            return False
        case "hang":
            await reader.read()
        case "garbage":
            writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
            return False
        case "badchunk":
            writer.write(_OK + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n")
            return False
    return False
