"""The engine's own loop in one process, without Redis, Celery and HTTP: what the whole path is compared with.

The engine is loaded in a spawned process, as the product does it, so that the bench's own stays free of torch.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self, cast

from ops.errors import OperationError
from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker import model_worker
from worker.engines.base import Engine, EngineError, EngineSequence

_LOAD_S: Final = 300.0
_RUN_S: Final = 300.0
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is there."""

    eos_ids: tuple[int, ...]
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: all sequences at once, to their last token."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class EngineLoop:
    """The process that holds the engine; it ends with the block. Settings as for a worker."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(
            target=_main, args=(dict(settings), self._child_end), name="carpool-bench-engine", daemon=True
        )
        self.loaded = Loaded((), "", "")

    def __enter__(self) -> Self:
        self._process.start()
        self._child_end.close()  # else its death would be no end of file here
        try:
            self.loaded = cast(Loaded, self._receive(_LOAD_S))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def run(self, bodies: Sequence[Mapping[str, Any]]) -> Ran:
        """Generate for bodies of `/generate_stream`, one slot each, and wait for the last token."""
        self._connection.send(list(bodies))
        return cast(Ran, self._receive(_RUN_S))

    def _receive(self, bound_s: float) -> object:
        try:
            answer: object = self._connection.recv() if self._connection.poll(bound_s) else f"silent for {bound_s:g} s"
        except EOFError:
            answer = "it ended; its output stands above"
        if isinstance(answer, str):
            raise OperationError(f"The engine's process cannot be measured: {answer}", "")
        return answer

    def _end(self) -> None:
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def generate(engine: Engine, bodies: Sequence[Mapping[str, Any]]) -> Ran:
    """Put all sequences into the engine and turn it until each has its tokens; prompts are encoded in the time."""
    started = time.perf_counter()
    left: dict[str, int] = {}
    for number, body in enumerate(bodies):
        fields = dict(body)
        prompt = str(fields.pop("prompt"))
        params = SamplingParams(**fields)
        id = str(number)
        left[id] = params.max_tokens or 1
        prompt_ids = tuple(engine.tokenizer.encode(prompt))
        engine.add(EngineSequence(id, prompt_ids, (), params, params.seed or 0, prompt))
    num_tokens = 0
    while left:
        for emission in engine.step():
            if emission.error is not None:
                raise emission.error
            num_tokens += len(emission.ids)
            left[emission.id] -= len(emission.ids)
            if left[emission.id] <= 0:
                engine.abort(emission.id)
                del left[emission.id]
    return Ran(num_tokens, time.perf_counter() - started)


def become_model_worker() -> None:
    """Set this process up as the Model worker does its own, so that the threads of both sides wait in the same way.

    It leaves Ctrl-C to the bench, which then closes the pipe.
    """
    model_worker.set_up_process()


def _main(settings: dict[str, Any], connection: Connection[Any, Any]) -> None:
    # As the product's processes: where the kernel shares a busy machine out by session, one side would get more of it.
    os.setsid()
    become_model_worker()
    used = Settings(**settings)
    try:
        engine = model_worker.engine_module(used.engine).load(used, lambda phase, fraction: None)
    except EngineError as error:
        connection.send(str(error))
        return
    connection.send(Loaded(tuple(engine.tokenizer.eos_ids), engine.card.device, engine.card.dtype))
    try:
        while True:
            connection.send(generate(engine, connection.recv()))
    except EOFError:
        engine.close()
