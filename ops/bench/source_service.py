"""The source design as a service, to be compared with: one program, iteration-level batching without a KV cache.

Its six parts are there: this API; the LLM engine, a thread; the Workload manager's queue and running batch; the Model
executor's process and the pipe to it; Model worker and Model manager in `ops/bench/source_model.py`. What the source
gets wrong is left out where it would only cost time: nothing blocks the event loop, and nothing polls.

Run as `python -m ops.bench.source_service PORT BATCH_SIZE SETTINGS`, the settings as JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import queue
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from ops.bench import source_model
from ops.bench.source_model import Encode, Generate, Step

_END_S: Final = 10.0


class StreamRequest(BaseModel):
    """Body of `POST /generate_stream`."""

    prompt: str
    max_tokens: int = 20
    temperature: float = 0.7


class GenerateRequest(BaseModel):
    """Body of `POST /basic_generate`."""

    prompt: str
    max_tokens: int = 50


@dataclass(slots=True)
class Sequence:
    """A stream in the running batch; `tokens` is read by its client, None is the end."""

    id: str
    ids: list[int]
    left: int
    temperature: float
    tokens: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)


class ModelExecutor:
    """Starts the Model worker and owns the way to it; one call at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=source_model.main, args=(settings, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self._lock = threading.Lock()
        answer = self._connection.recv()
        if answer is not True:
            raise SystemExit(f"the model cannot be had: {answer}")

    def call(self, message: Encode | Step | Generate) -> Any:
        with self._lock:
            self._connection.send(message)
            return self._connection.recv()

    def close(self) -> None:
        with self._lock:
            self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class LLMEngine:
    """One thread: fills free slots at every step, computes it, hands tokens to their clients."""

    def __init__(self, executor: ModelExecutor, batch_size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._executor = executor
        self._batch_size = batch_size
        self._loop = loop
        self._waiting: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        self._waiting.put(sequence)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        running: list[Sequence] = []
        while True:
            while len(running) < self._batch_size and not (running and self._waiting.empty()):
                sequence = self._waiting.get()
                if sequence is None:
                    return
                running.append(sequence)
            temperature = running[0].temperature
            step = Step(tuple(tuple(sequence.ids) for sequence in running), temperature)
            drawn = cast(list[tuple[int, str]], self._executor.call(step))
            for sequence, (token_id, text) in zip(running, drawn, strict=True):
                sequence.ids.append(token_id)
                sequence.left -= 1
                self._hand_over(sequence, text)
            running = [sequence for sequence in running if sequence.left > 0]

    def _hand_over(self, sequence: Sequence, text: str) -> None:
        self._loop.call_soon_threadsafe(sequence.tokens.put_nowait, text)
        if sequence.left == 0:
            self._loop.call_soon_threadsafe(sequence.tokens.put_nowait, None)


def create_app(settings: dict[str, Any], batch_size: int) -> FastAPI:
    """The source design's API; the model is loaded when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        executor = await asyncio.to_thread(ModelExecutor, settings)
        engine = LLMEngine(executor, batch_size, asyncio.get_running_loop())
        app.state.executor, app.state.engine = executor, engine
        try:
            yield
        finally:
            engine.close()
            executor.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/basic_generate")
    def basic_generate(body: GenerateRequest) -> dict[str, str]:
        # a thread of the pool, and the executor's lock: one prompt a call, the others wait
        return {"generated_text": app.state.executor.call(Generate(body.prompt, body.max_tokens))}

    @app.post("/generate_stream")
    async def generate_stream(body: StreamRequest) -> StreamingResponse:
        ids = await asyncio.to_thread(app.state.executor.call, Encode(body.prompt))
        sequence = Sequence(f"{id(body):x}", ids, body.max_tokens, body.temperature)
        app.state.engine.add(sequence)

        async def events() -> AsyncIterator[str]:
            while (token := await sequence.tokens.get()) is not None:
                yield f"data: {json.dumps({'token': token, 'sequence_id': sequence.id})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main(port: int, batch_size: int, settings: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    app = create_app(settings, batch_size)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
