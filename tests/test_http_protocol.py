"""Bounds on a request's arrival: clients that send endless heads, half a request, or a byte now and then."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.test_api_server import BOUND_S, api_process

RECEIVE_S = 1.0
HEAD = b"HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /jobs " + HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.fixture(scope="module")
def server(redis_server: Any) -> Iterator[tuple[int, psutil.Process]]:
    """Port and process of an API that gives a request one second."""
    with api_process(redis_server.url, CARPOOL_RECEIVE_TIMEOUT_S=str(RECEIVE_S)) as (process, url):
        yield int(url.rpartition(":")[2]), psutil.Process(process.pid)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), BOUND_S)


def _answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer; the connection has to be closed behind it."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (CHUNKED + b"0\r\n", b"X-More: " + b"x" * 8000 + b"\r\n"),
        (CHUNKED + b"1;", b"x" * 8000),
        (b"GET / " + HEAD, b"X-More: " + b"x" * 8000 + b"\r\n"),
        (b"GET / " + HEAD + b"X-Long: ", b"x" * 8000),
        (b"GET /", b"x" * 8000),
    ],
    ids=["trailers", "a chunk's extension", "many headers", "a long header", "a long address"],
)
def test_an_endless_head_is_refused_and_takes_no_memory(
    server: tuple[int, psutil.Process], start: bytes, piece: bytes
) -> None:
    port, process = server
    before = process.memory_info().rss
    with _connect(port) as connection:
        connection.sendall(start)
        sent = 0
        refused = False
        while not refused and sent < 50_000_000:
            try:
                connection.sendall(piece)
                sent += len(piece)
            except OSError:
                refused = True
    assert refused
    assert process.memory_info().rss - before < 10_000_000


def test_a_head_that_is_too_long_is_named(server: tuple[int, psutil.Process]) -> None:
    with _connect(server[0]) as connection:
        # hardly more than is allowed: an answer to a client that has sent more is lost with the connection
        connection.sendall((b"GET / " + HEAD + b"X-More: ").ljust(64 * 1024 + 50, b"x"))
        status, error = _answer(connection)
    assert (status, error["code"]) == (431, "head_too_large")
    assert "65536 bytes" in error["message"]


@pytest.mark.parametrize(
    "start",
    [
        b"G",
        b"POST /jobs " + HEAD,
        b"POST /jobs " + HEAD + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["a byte", "half a head", "half a body"],
)
def test_half_a_request_is_not_waited_for(server: tuple[int, psutil.Process], start: bytes) -> None:
    with _connect(server[0]) as connection:
        connection.sendall(start)
        status, error = _answer(connection)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "CARPOOL_RECEIVE_TIMEOUT_S" in error["message"]


def test_a_head_that_comes_byte_by_byte_has_no_more_time(server: tuple[int, psutil.Process]) -> None:
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in b"GET / " + HEAD + b"X-Slow: " + b"x" * 1000:
            if done.wait(RECEIVE_S / 20):
                return
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return

    with _connect(server[0]) as connection:
        dripping = threading.Thread(target=drip, args=(connection,))
        dripping.start()
        try:
            assert _answer(connection)[0] == 408
        finally:
            done.set()
            dripping.join()


def test_a_body_that_comes_slowly_is_taken(server: tuple[int, psutil.Process]) -> None:
    body = json.dumps({"prompt": "slow", "unknown": 1}).encode()
    head = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    silence = threading.Event()
    with _connect(server[0]) as connection:
        connection.sendall(b"POST /jobs " + HEAD + head)
        for at in range(0, len(body), 6):
            silence.wait(RECEIVE_S / 4)  # nothing is to be waited for: it is the pause that is tested
            connection.sendall(body[at : at + 6])
        assert _answer(connection)[0] == 422


def test_requests_one_after_the_other_have_their_time_each(server: tuple[int, psutil.Process]) -> None:
    pause = threading.Event()
    with _connect(server[0]) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health/live " + HEAD + b"\r\n")
            received = b""
            while not received.endswith(b"}"):
                piece = connection.recv(65536)
                assert piece, "the connection was closed"
                received += piece
            assert received.startswith(b"HTTP/1.1 200")
            pause.wait(1.2 * RECEIVE_S)  # between requests a connection may be silent


def _post(body: bytes, *headers: bytes) -> bytes:
    lines = (b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers)
    return b"POST /jobs " + HEAD + b"\r\n".join(lines) + b"\r\n\r\n" + body


def _read_one(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    head = received.lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(received.split()[1]), body


def test_an_offer_of_another_protocol_costs_no_body_and_no_connection(server: tuple[int, psutil.Process]) -> None:
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    with _connect(server[0]) as connection:
        connection.sendall(_post(b'{"prompt": "a", "max_tokens": 1}', *offer))
        status, body = _read_one(connection)
        assert (status, json.loads(body)["status"]) == (202, "queued")
        connection.sendall(_post(b'{"prompt": "b", "max_tokens": 1}'))
        assert _read_one(connection)[0] == 202


def test_what_stands_behind_a_request_does_not_touch_its_answer(server: tuple[int, psutil.Process]) -> None:
    request = _post(b'{"prompt": "a", "max_tokens": 1}')
    too_long = b"GET /x " + b"y" * 70_000
    for behind, expected in ((b"no HTTP at all\r\n\r\n", "invalid_http"), (too_long, "head_too_large")):
        with _connect(server[0]) as connection:
            connection.sendall(request + behind)
            assert _read_one(connection)[0] == 202
            assert _answer(connection)[1]["code"] == expected
    with _connect(server[0]) as connection:
        connection.sendall(request + b"GET /half")
        assert _read_one(connection)[0] == 202
        assert _answer(connection)[1]["code"] == "request_timeout"
    with _connect(server[0]) as connection:
        connection.sendall(request * 5)
        assert [_read_one(connection)[0] for _ in range(5)] == [202] * 5


def test_what_is_no_http_gets_an_error_like_all_others(server: tuple[int, psutil.Process]) -> None:
    for request in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / " + HEAD + b"Host: two\r\n\r\n"):
        with _connect(server[0]) as connection:
            connection.sendall(request)
            status, error = _answer(connection)
            assert (status, error["code"]) == (400, "invalid_http")


def test_a_client_of_http_1_0_gets_no_chunks(server: tuple[int, psutil.Process]) -> None:
    with _connect(server[0]) as connection:
        connection.sendall(b"GET /health/live HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert json.loads(body) == {"status": "live"}
