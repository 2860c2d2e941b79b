"""The pipes between Model executor and Model worker, without a child: order, full pipes, ends that are gone."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from worker.channel import CommandWriter
from worker.messages import Abort, Command

Ends = tuple["Connection[Any, Any]", "Connection[Any, Any]"]


@pytest.fixture
def ends() -> Iterator[Ends]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    yield reader, writer
    reader.close()
    writer.close()


def _read(reader: Connection[Any, Any], count: int) -> list[Command]:
    assert reader.poll(10)
    return [pickle.loads(reader.recv_bytes()) for _ in range(count)]


def test_commands_keep_their_order_while_nobody_reads(ends: Ends) -> None:
    reader, connection = ends
    writer = CommandWriter(connection, "test-writer")
    # far more than a pipe holds, small and large in turn: some written by `send`, some by the thread
    commands: list[Command] = [Abort(f"{number} {'x' * (9000 if number % 3 == 2 else 10)}") for number in range(200)]
    for command in commands:
        writer.send(command)  # a pipe that is full must not hold it up
    assert _read(reader, len(commands)) == commands
    last = Abort("last")
    writer.send(last)
    assert _read(reader, 1) == [last]
    writer.close()


def test_a_small_command_is_in_the_pipe_when_send_returns(ends: Ends) -> None:
    reader, connection = ends
    writer = CommandWriter(connection, "test-writer")
    writer.send(Abort("a"))
    assert reader.poll(0)
    writer.close()


def test_a_command_for_a_child_that_is_gone_is_dropped(ends: Ends) -> None:
    reader, connection = ends
    writer = CommandWriter(connection, "test-writer")
    reader.close()
    writer.send(Abort("a"))
    writer.send(Abort("b" * 10_000))
    writer.close()
    writer.send(Abort("after the end"))
    assert "test-writer" not in {thread.name for thread in threading.enumerate()}
