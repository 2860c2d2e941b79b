"""The two one-way pipes between Model executor (parent) and Model worker (child): commands down, updates up.

Pipes and not multiprocessing queues: a queue's reader can wait for ever for the second half of a message whose writer
was killed, and its lock can die with its owner. Each end of a pipe is open in one process only, so that a death on the
other side is an end of file here, behind everything that was sent before it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import selectors
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, cast

from worker.messages import Command, Update

#: Exit code of a child whose parent is gone.
EXIT_PARENT_GONE: Final = 4
#: What multiprocessing writes before a message.
_LENGTH_BYTES: Final = 4


class CommandWriter:
    """The parent's end of the command pipe. `send` never blocks: a thread writes what does not fit at once."""

    def __init__(self, connection: Connection[Any, Any], name: str) -> None:
        self._connection = connection
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._lock = threading.Lock()
        self._commands: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_queued = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Send behind what was sent before. What comes after `close` is dropped."""
        data = _pickled(command)
        with self._lock:
            if self._closed:
                return
            if self._num_queued or not self._has_room_for(data):
                self._num_queued += 1
                self._commands.put(data)
            else:
                self._write_one(data)

    def close(self) -> None:
        """End the thread and close the pipe. The child must be dead: a live one that reads nothing blocks this."""
        with self._lock:
            self._closed = True
        self._commands.put(None)
        self._thread.join()
        self._connection.close()

    def _has_room_for(self, data: bytes) -> bool:
        # A pipe that says it is writable takes PIPE_BUF bytes at once; the length stands before the message.
        if len(data) + _LENGTH_BYTES > select.PIPE_BUF:
            return False
        return any(state == select.POLLOUT for _, state in self._room.poll(0))

    def _write(self) -> None:
        while (data := self._commands.get()) is not None:
            self._write_one(data)
            with self._lock:
                self._num_queued -= 1

    def _write_one(self, data: bytes) -> None:
        # A pipe that breaks is that of a dead child: whoever reads its updates learns of it.
        with contextlib.suppress(BrokenPipeError):
            self._connection.send_bytes(data)


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
                self._connection.send_bytes(_pickled(update))
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


def _pickled(message: Command | Update) -> bytes:
    return pickle.dumps(message, protocol=5)
