"""What each hop of a request costs by itself: the floor that the time to the first token is compared with.

Hops between two processes are measured from the call here to the arrival there; the monotonic clock of a machine is
the same for all its processes.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import redis
from kombu import Connection as BrokerConnection

from ops.bench.http_client import HttpConnection
from ops.errors import OperationError
from tasks.acceptance import job_acceptance
from tasks.job_request import JobRequest, SamplingParams
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.settings import Settings
from worker.messages import Add, Delta, Stepped

Hop = Literal["list", "broker", "channel", "pipe"]
#: Between two measurements. Nothing tells when a process is back at its wait; and a request that comes alone, which
#: is what the hops are compared with, finds processes that sleep.
SETTLE_S: Final = 0.01
_ANSWER_S: Final = 10.0
#: A pool that no worker serves: its jobs are accepted, and nobody is invited.
_POOL: Final = "bench-floor"
_NAME: Final = "carpool-bench"


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds of each hop, measured one after the other.

    Attributes:
        http: a request that does nothing, and its answer.
        accept: the script that accepts a job.
        broker: one message through kombu, from this process to another.
        plain_list: the same by LPUSH and BRPOP alone.
        pipe: a command to another process and an update back.
        publish: one message on a channel, from this process to another.
    """

    http: float
    accept: float
    broker: float
    plain_list: float
    pipe: float
    publish: float


class Hops:
    """Measures all hops against a running instance; it holds the other process of the hops, which ends with the block.

    Args:
        redis_url: of the instance.
    """

    def __init__(self, redis_url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._peer, self._peer_end = context.Pipe()
        self._process = context.Process(
            target=_main, args=(redis_url, self._peer_end), name="carpool-bench-peer", daemon=True
        )
        self._settings = Settings(redis_url=redis_url)
        self._client = connect(self._settings)
        self._ledger = SyncLedger(self._client, self._settings)
        self._broker = BrokerConnection(redis_url)
        self._queue = self._broker.SimpleQueue(_NAME, no_ack=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._peer_end.close()  # else its death would be no end of file here
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._peer.close()
        self._process.join(_ANSWER_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._queue.close()
        self._broker.release()
        self._client.close()

    async def measure(self, connection: HttpConnection) -> HopTimes:
        """One sample of each hop. Nothing else may run in the event loop: all but HTTP blocks it."""
        started = time.perf_counter()
        await connection.get("/health/live")
        http = time.perf_counter() - started
        message = {"id": str(uuid.uuid4()), "task": "carpool.generate"}
        return HopTimes(
            http=http,
            accept=self._accept(),
            broker=self._one_way("broker", lambda: self._queue.put(message)),
            plain_list=self._one_way("list", lambda: self._client.lpush(f"{_NAME}-list", "x" * 300)),
            pipe=self._round_trip(),
            publish=self._one_way("channel", lambda: self._client.publish(_NAME, "x" * 80)),
        )

    def _accept(self) -> float:
        request = JobRequest(prompt="Hello, I am", max_tokens=20, seed=1)
        acceptance = job_acceptance(str(uuid.uuid4()), _POOL, request, self._settings)
        time.sleep(SETTLE_S)  # what is measured begins with everybody asleep, as a lone request finds it
        started = time.perf_counter()
        self._ledger.run(self._ledger.calls.accept(acceptance))
        return time.perf_counter() - started

    def _one_way(self, hop: Hop, send: Callable[[], object]) -> float:
        self._prepare(hop)
        sent = time.monotonic()
        send()
        return cast(float, self._receive()) - sent

    def _round_trip(self) -> float:
        params = SamplingParams(max_tokens=20)
        command = Add(id=str(uuid.uuid4()), prompt="Hello, I am", messages=None, params=params, seed=1)
        self._prepare("pipe")
        sent = time.monotonic()
        self._peer.send(command)
        self._receive()
        return time.monotonic() - sent

    def _prepare(self, hop: Hop) -> None:
        self._peer.send(hop)
        self._receive()
        time.sleep(SETTLE_S)  # what is measured begins with everybody asleep, as a lone request finds it

    def _receive(self) -> object:
        try:
            if self._peer.poll(_ANSWER_S):
                return self._peer.recv()
        except EOFError:
            raise OperationError("The bench's second process has ended; its output stands above", "") from None
        raise OperationError(f"The bench's second process is silent for {_ANSWER_S:g} s", "Run it on a calmer machine")


def _main(redis_url: str, bench: Connection[Any, Any]) -> None:
    """The other process: for each hop that is named, say that it waits, take one thing, and say when it came."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the bench, which then closes the pipe
    with (
        redis.Redis.from_url(redis_url, socket_timeout=2 * _ANSWER_S) as client,
        BrokerConnection(redis_url) as broker,
        client.pubsub(ignore_subscribe_messages=True) as pubsub,
    ):
        pubsub.subscribe(_NAME)
        pubsub.get_message(timeout=_ANSWER_S)  # the confirmation
        incoming = broker.SimpleQueue(_NAME, no_ack=True)
        take: dict[Hop, Callable[[], object]] = {
            "list": lambda: client.brpop([f"{_NAME}-list"], timeout=_ANSWER_S),
            "broker": lambda: incoming.get(timeout=_ANSWER_S),
            "channel": lambda: pubsub.get_message(timeout=_ANSWER_S),
        }
        try:
            while True:
                hop = cast(Hop, bench.recv())
                bench.send(None)
                if hop == "pipe":
                    command = cast(Add, bench.recv())
                    bench.send(Stepped(1, (Delta(command.id, (1,), (" token",), prompt_tokens=3),), 0.0))
                else:
                    take[hop]()
                    bench.send(time.monotonic())
        except EOFError:
            incoming.close()
