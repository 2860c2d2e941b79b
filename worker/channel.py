"""The two one-way pipes between Model executor (parent) and Model worker (child): commands down, updates up.

Pipes and not multiprocessing queues: a queue's reader can wait for ever for the second half of a message whose writer
was killed, and its lock can die with its owner. Each end of a pipe is open in one process only, so that a death on the
other side is an end of file here, behind everything that was sent before it.
"""

from __future__ import annotations

import os
import pickle
import selectors
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, cast

from worker.messages import Command, Update

#: Exit code of a child whose parent is gone.
EXIT_PARENT_GONE: Final = 4


class CommandWriter:
    """The parent's end of the command pipe. `send` never blocks: a thread does the writing."""

    def __init__(self, connection: Connection[Any, Any], name: str) -> None:
        self._connection = connection
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def close(self) -> None:
        """End the thread and close the pipe. The child must be dead: a live one that reads nothing blocks this."""
        self._commands.put(None)
        self._thread.join()
        self._connection.close()

    def _write(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                _send(self._connection, command)
            except BrokenPipeError:
                return  # The child is dead; whoever reads its updates learns of it.


class CommandReader:
    """The child's end of the command pipe: a thread reads it at all times, also during a long step or load.

    When the parent is gone the process exits at once: nobody wants what it computes, and its device memory is wanted.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._commands: SimpleQueue[Command] = SimpleQueue()
        threading.Thread(target=self._read, name="command-reader", daemon=True).start()

    def take(self, block: bool) -> Iterator[Command]:
        """All commands that have come; with `block` it waits for the first."""
        if block:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get()

    def _read(self) -> None:
        while True:
            try:
                command = cast(Command, self._connection.recv())
            except (EOFError, OSError):
                os._exit(EXIT_PARENT_GONE)
            self._commands.put(command)


class UpdateWriter:
    """The child's end of the update pipe. It blocks while the pipe is full, which only a stopped parent lets happen."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # Progress of a load may be reported from a thread of a library.

    def send(self, update: Update) -> None:
        try:
            with self._lock:
                _send(self._connection, update)
        except BrokenPipeError:
            os._exit(EXIT_PARENT_GONE)


class UpdateReader:
    """The parent's end of the update pipe.

    Args:
        sentinel: file descriptor that becomes readable when the child is dead.
    """

    def __init__(self, connection: Connection[Any, Any], sentinel: int) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(sentinel, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[Update]:
        """Every update, until the child is dead and all that it sent has been read."""
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            # What was sent just before the death may have come after the look at the pipe: look again.
            if self._connection not in ready and not self._connection.poll():
                return
            try:
                update = cast(Update, self._connection.recv())
            except (EOFError, OSError):  # OSError: killed in the middle of a message.
                return
            yield update

    def close(self) -> None:
        self._selector.close()
        self._connection.close()


def _send(connection: Connection[Any, Any], message: Command | Update) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=5))
