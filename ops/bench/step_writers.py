"""Load on the step script alone: jobs that nobody generates, processes that write their steps, one that follows them.

The calls are built by the code of the workers (`tasks/calls.py`); only the sockets are barer than theirs, so that the
clients leave the processor to the server.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import hiredis

from ops.errors import OperationError
from tasks import keys
from tasks.calls import Calls
from tasks.ledger import SyncLedger, script_text
from tasks.ledger_types import Acceptance, Job, Rider, SlotWrite
from tasks.redis_clients import connect, database
from tasks.settings import Settings

SLOTS: Final = 4
#: Of no worker: nothing but the writers touches its jobs.
_POOL: Final = "wall"
_BOUND_S: Final = 60.0
_PIECE: Final = 1 << 20
#: Of a published message, in the wire format (RESP2).
_MESSAGE: Final = b"\r\nmessage\r\n"
#: Texts of tokens, as long as those of a real tokenizer are on average.
_WORDS: Final = (" the", " of", " sea", "ing", " and", ",", " water", " under", ".", " that")

Gpu = Sequence[Rider]


def claim_gpus(redis_url: str, count: int) -> list[list[Rider]]:
    """Accept and claim four jobs for each GPU."""
    settings = Settings(redis_url=redis_url)
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        return [[_claim(ledger) for _ in range(SLOTS)] for _ in range(count)]


def _claim(ledger: SyncLedger) -> Rider:
    id, nonce = str(uuid.uuid4()), uuid.uuid4().hex
    job = Job(7, '{"prompt": "Hello, I am"}')
    ledger.run(ledger.calls.accept(Acceptance(id, _POOL, '{"max_tokens": 1000000}', [job], deadline_s=3600)))
    claim = ledger.run(ledger.calls.claim(id, nonce, "wall", "wall", "wall", 1, board=True))
    if claim.verdict != "ok":
        raise OperationError(f"Job {id} was not granted: {claim.verdict}", "Look at the server's log")
    return Rider(id, claim.epoch, nonce)


class _Socket:
    """A connection to the server, bare."""

    def __init__(self, redis_url: str) -> None:
        parts = urlsplit(redis_url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), _BOUND_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = hiredis.Reader()
        if parts.password:
            self.send("AUTH", unquote(parts.password))
            self.reply()

    def send(self, *command: str | int | bytes) -> None:
        self._socket.sendall(hiredis.pack_command(command))

    def receive(self) -> bytes:
        """What has come, once something has."""
        return self._socket.recv(_PIECE)

    def reply(self) -> Any:
        """The next answer. Raises OperationError where it is an error, or the connection was lost."""
        while (answer := self._replies.gets()) is False:
            piece = self.receive()
            if not piece:
                raise OperationError("The server closed a connection", "Look at its log")
            self._replies.feed(piece)
        if isinstance(answer, hiredis.ReplyError):
            raise OperationError(f"The server refused a call: {answer}", "Look at its log")
        return answer

    def fileno(self) -> int:
        return self._socket.fileno()


@dataclass(slots=True)
class _Steps:
    """The steps of one GPU: what its next call writes."""

    riders: Gpu
    k: int = 0

    def writes(self, count: int) -> list[SlotWrite]:
        ids = tuple(10_000 + (self.k + i) % 39_000 for i in range(1, count + 1))
        texts = tuple(_WORDS[id % len(_WORDS)] for id in ids)
        first = self.k + 1
        self.k += count
        return [SlotWrite(rider.id, rider.epoch, rider.nonce, first, ids, texts) for rider in self.riders]


class _Worker:
    """A process and the pipe to it; it ends with the block."""

    def __init__(self, body: Any, *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self.pipe.poll(_BOUND_S):
            raise OperationError(f"A client of the bench was silent for {_BOUND_S:g} s", "Run it on a quiet machine")
        try:
            return self.pipe.recv()
        except EOFError:
            raise OperationError("A client of the bench has died", "Its last words are above") from None

    def __enter__(self) -> Self:
        self.answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join()
        self.pipe.close()


class Writer(_Worker):
    """A process that writes the steps of these GPUs, each on a connection of its own."""

    def __init__(self, redis_url: str, gpus: Sequence[Gpu]) -> None:
        super().__init__(_write, redis_url, gpus)

    def start(self, connections: int, tokens_per_entry: int, seconds: float) -> None:
        """Write on so many connections at once for so long."""
        self.pipe.send((connections, tokens_per_entry, seconds))

    def calls(self) -> int:
        """How many calls were answered, once all were."""
        return int(self.answer())


class Subscriber(_Worker):
    """A process that follows every job on one connection, as an API process does."""

    def __init__(self, redis_url: str, gpus: Sequence[Gpu]) -> None:
        super().__init__(_follow, redis_url, [rider.id for gpu in gpus for rider in gpu])

    def expect(self, entries: int) -> None:
        """Wait until it has got so many entries since the last time."""
        self.pipe.send(entries)
        self.answer()


def _write(pipe: Connection[Any, Any], redis_url: str, gpus: Sequence[Gpu]) -> None:
    calls = Calls(Settings(redis_url=redis_url))
    lanes = [(_Socket(redis_url), _Steps(gpu)) for gpu in gpus]
    lanes[0][0].send("SCRIPT", "LOAD", script_text("step"))
    digest = lanes[0][0].reply()
    pipe.send("ready")
    for connections, tokens_per_entry, seconds in _orders(pipe):
        used, done, until = lanes[:connections], 0, time.monotonic() + seconds
        while time.monotonic() < until:
            for connection, steps in used:
                call = calls.step(steps.writes(tokens_per_entry))
                connection.send("EVALSHA", digest, len(call.keys), *call.keys, *call.args)
            for connection, _ in used:
                verdicts = [slot[0] for slot in connection.reply()]
                if verdicts != [b"ok"] * SLOTS:
                    raise OperationError(f"A step was refused: {verdicts}", "Look at the server's log")
                done += 1
        pipe.send(done)


def _follow(pipe: Connection[Any, Any], redis_url: str, ids: Sequence[str]) -> None:
    connection = _Socket(redis_url)
    connection.send("SUBSCRIBE", *(keys.channel(database(redis_url), id) for id in ids))
    for _ in ids:
        connection.reply()
    pipe.send("ready")
    got, expected, rest, is_asked = 0, 0, b"", False
    while True:
        for ready in wait([pipe, connection.fileno()]):
            if ready is pipe:
                try:
                    expected += int(pipe.recv())
                except EOFError:
                    return
                is_asked = True
            else:
                data = rest + connection.receive()
                got += data.count(_MESSAGE)
                # the part that may begin a mark that ends in the next piece
                rest = data[-len(_MESSAGE) + 1 :]
        if is_asked and got >= expected:
            pipe.send("here")
            is_asked = False


def _orders(pipe: Connection[Any, Any]) -> Iterator[tuple[int, int, float]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
