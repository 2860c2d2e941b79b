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
from itertools import count
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
POOL: Final = "wall"
_BOUND_S: Final = 60.0
_PIECE: Final = 1 << 20
#: Of a published message, in the wire format (RESP2).
_MESSAGE: Final = b"\r\nmessage\r\n"
#: Texts of tokens, as long as those of a real tokenizer are on average.
_WORDS: Final = (" the", " of", " sea", "ing", " and", ",", " water", " under", ".", " that")

Gpu = Sequence[Rider]


def claim_gpus(redis_url: str, num_gpus: int) -> list[list[Rider]]:
    """Accept and claim four jobs for each GPU."""
    settings = Settings(redis_url=redis_url)
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        return [[claim_job(ledger) for _ in range(SLOTS)] for _ in range(num_gpus)]


def claim_job(ledger: SyncLedger) -> Rider:
    """A new job, accepted, claimed and boarded."""
    id, nonce = str(uuid.uuid4()), uuid.uuid4().hex
    job = Job(7, '{"prompt": "Hello, I am"}')
    ledger.run(ledger.calls.accept(Acceptance(id, POOL, '{"max_tokens": 1000000}', [job], deadline_s=3600)))
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
        self._socket.sendall(hiredis.pack_command(command))  # type: ignore[arg-type] # its stub knows tuples of one

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


@dataclass(frozen=True, slots=True)
class Order:
    """What a writer is to do.

    Attributes:
        gpus: of how many it writes the steps.
        interval_s: between two calls of one GPU; 0 has each call follow the answer to the last.
        together: GPUs whose slots go into one call, as if they were one GPU with many slots.
    """

    gpus: int
    seconds: float
    tokens_per_entry: int = 1
    interval_s: float = 0.0
    together: int = 1


@dataclass(slots=True)
class _Steps:
    """The steps of one GPU: what its next call writes."""

    riders: Gpu
    k: int = 0

    def writes(self, num_tokens: int) -> list[SlotWrite]:
        ids = tuple(10_000 + (self.k + i) % 39_000 for i in range(1, num_tokens + 1))
        texts = tuple(_WORDS[id % len(_WORDS)] for id in ids)
        first = self.k + 1
        self.k += num_tokens
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

    def start(self, order: Order) -> None:
        self.pipe.send(order)

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


class _Lane:
    """The calls of one GPU, or of several together, on one connection: one at a time."""

    def __init__(self, connection: _Socket, steps: Sequence[_Steps], calls: Calls, digest: bytes) -> None:
        self._connection = connection
        self._steps = steps
        self._calls = calls
        self._digest = digest
        self.is_waiting = False

    def send(self, tokens_per_entry: int) -> None:
        call = self._calls.step([write for steps in self._steps for write in steps.writes(tokens_per_entry)])
        self._connection.send("EVALSHA", self._digest, len(call.keys), *call.keys, *call.args)
        self.is_waiting = True

    def answer(self) -> None:
        """Wait for it. Raises OperationError where a slot was not written."""
        verdicts = {slot[0] for slot in self._connection.reply()}
        if verdicts != {b"ok"}:
            raise OperationError(f"A step was refused: {verdicts}", "Look at the server's log")
        self.is_waiting = False


def _write(pipe: Connection[Any, Any], redis_url: str, gpus: Sequence[Gpu]) -> None:
    calls = Calls(Settings(redis_url=redis_url))
    connections, steps = [_Socket(redis_url) for _ in gpus], list(map(_Steps, gpus))
    connections[0].send("SCRIPT", "LOAD", script_text("step"))
    digest = connections[0].reply()
    pipe.send("ready")
    for order in _orders(pipe):
        starts = range(0, order.gpus, order.together)
        lanes = [_Lane(connections[at], steps[at : at + order.together], calls, digest) for at in starts]
        pipe.send(_carry_out(order, lanes))


def _carry_out(order: Order, lanes: Sequence[_Lane]) -> int:
    """How many calls were answered."""
    done, begin = 0, time.monotonic()
    for number in count():
        # spread over the interval, as the steps of GPUs that know nothing of each other are
        due = begin + order.interval_s * number / len(lanes)
        if max(due, time.monotonic()) > begin + order.seconds:
            break
        time.sleep(max(0.0, due - time.monotonic()))  # the pace is what is measured
        lane = lanes[number % len(lanes)]
        if lane.is_waiting:
            lane.answer()
            done += 1
        lane.send(order.tokens_per_entry)
    for lane in lanes:
        if lane.is_waiting:
            lane.answer()
            done += 1
    return done


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


def _orders(pipe: Connection[Any, Any]) -> Iterator[Order]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
