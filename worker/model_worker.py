"""The Model worker: a process of its own that loads one model and turns the step loop.

Its parent is the Model executor; it knows nothing of Redis or jobs. This module imports no engine: `main` loads the one
that the settings name, so that torch is in the child alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol, cast

from tasks.settings import EngineName, Settings
from worker.channel import CommandReader, UpdateWriter
from worker.engines.base import Engine, EngineError, EngineSequence, Report, SequenceError
from worker.messages import (
    Abort,
    Aborted,
    Accepted,
    Add,
    Broken,
    Close,
    Command,
    Delta,
    Failed,
    Phase,
    Ready,
    Stepped,
    Update,
)
from worker.sequence import TextSequence

#: The child said Broken: starting it again would end the same way.
EXIT_BROKEN: Final = 3

ENGINE_MODULES: Final[dict[EngineName, str]] = {
    "transformers": "worker.engines.transformers_engine",
    "vllm": "worker.engines.vllm_engine",
    "simulated": "worker.engines.simulated",
}


class EngineModule(Protocol):
    """What each module of `worker.engines` has to offer."""

    def load(self, settings: Settings, report: Report) -> Engine:
        """Load the model onto its device and warm it up.

        Raises:
            EngineError: it cannot be loaded, and trying again would not help.
        """


class CommandSource(Protocol):
    def take(self, block: bool) -> Iterator[Command]:
        """All commands that have come; with `block` it waits for the first."""


class StepLoop:
    """Commands in, one turn of the engine after the other, updates out.

    A turn runs while something rides and fewer than `run_ahead_steps` turns are not yet accepted by the ledger; else
    the loop waits for a command.
    """

    def __init__(
        self, engine: Engine, commands: CommandSource, send: Callable[[Update], None], run_ahead_steps: int
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._run_ahead_steps = run_ahead_steps
        self._riding: dict[str, TextSequence] = {}
        #: Sequences whose first delta is not out yet; one that its earlier rides already ended is here alone.
        self._boarding: dict[str, TextSequence] = {}
        self._step = 0
        self._accepted = 0

    def run(self) -> None:
        """Turn until Close. An exception of the engine ends the process: its state can no longer be trusted."""
        while True:
            for command in self._commands.take(block=not self._may_turn()):
                if isinstance(command, Close):
                    return
                self._handle(command)
            if self._may_turn():
                self._turn()

    def _may_turn(self) -> bool:
        return bool(self._riding or self._boarding) and self._step - self._accepted < self._run_ahead_steps

    def _handle(self, command: Add | Abort | Accepted) -> None:
        match command:
            case Add():
                try:
                    self._add(command)
                except SequenceError as error:
                    self._send(Failed(command.id, error.code, str(error), self._step))
            case Abort():
                sequence = self._leave(command.id)
                self._send(Aborted(command.id, sequence.end() if sequence is not None else "", self._step))
            case Accepted():
                # Never beyond what was done here: a word meant for an earlier process must not widen the bound.
                self._accepted = max(self._accepted, min(command.step, self._step))

    def _add(self, command: Add) -> None:
        self._leave(command.id)
        tokenizer = self._engine.tokenizer
        if command.prompt is not None:
            if command.params.offers_tools:
                raise SequenceError(
                    "invalid_request", "tools are shown by a chat template: send messages instead of a prompt"
                )
            prompt, prompt_ids = command.prompt, tokenizer.encode(command.prompt)
        else:
            tools = command.params.tools if command.params.offers_tools else None
            prompt, prompt_ids = tokenizer.encode_chat(command.messages or (), tools or ())
        if not prompt_ids:
            raise SequenceError("invalid_request", f"the prompt {prompt[:40]!r} has no tokens: give one that has")
        max_tokens = _fitting_max_tokens(command, len(prompt_ids), self._engine.card.context_length)
        sequence = TextSequence(command.id, prompt_ids, tokenizer, command.params.stop, max_tokens)
        sequence.replay(command.ids)
        if sequence.finish is None:
            self._engine.add(
                EngineSequence(
                    id=command.id,
                    prompt_ids=tuple(prompt_ids),
                    output_ids=command.ids,
                    params=command.params.model_copy(update={"max_tokens": max_tokens}),
                    seed=command.seed,
                    prompt=prompt,
                )
            )
            self._riding[command.id] = sequence
        self._boarding[command.id] = sequence

    def _turn(self) -> None:
        started = time.perf_counter()
        emissions = self._engine.step() if self._riding else []
        seconds = time.perf_counter() - started
        self._step += 1
        deltas: list[Delta] = []
        failed: list[Failed] = []
        for emission in emissions:
            sequence = self._riding[emission.id]
            if emission.error is not None:
                self._leave(emission.id)
                failed.append(Failed(emission.id, emission.error.code, str(emission.error), self._step, sequence.end()))
            elif emission.ids:
                self._boarding.pop(emission.id, None)
                deltas.append(
                    sequence.feed(
                        emission.ids,
                        emission.logprobs,
                        is_complete=emission.is_complete,
                        cached_tokens=emission.num_cached,
                    )
                )
                if sequence.finish is not None:
                    self._leave(emission.id)
        deltas.extend(sequence.feed(()) for sequence in self._boarding.values())
        self._boarding.clear()
        self._send(Stepped(self._step, tuple(deltas), seconds))
        for update in failed:
            self._send(update)

    def _leave(self, id: str) -> TextSequence | None:
        """Take a sequence out everywhere; its slot is free before the next step."""
        boarding = self._boarding.pop(id, None)
        riding = self._riding.pop(id, None)
        if riding is not None:
            self._engine.abort(id)
        return riding or boarding


def main(settings: Settings, command_pipe: Connection[Any, Any], update_pipe: Connection[Any, Any]) -> None:
    """Body of the child process: load the engine, say Ready, turn the step loop until Close.

    Exit codes: 0 after Close; 1 after an exception, whose traceback goes to stderr; `EXIT_BROKEN` after Broken;
    `worker.channel.EXIT_PARENT_GONE` when the parent is gone.
    """
    set_up_process()
    for pipe in (command_pipe, update_pipe):
        os.set_inheritable(pipe.fileno(), False)  # Else a helper of a library would keep them open after our death.
    commands = CommandReader(command_pipe)
    updates = UpdateWriter(update_pipe)

    def report(name: str, fraction: float | None) -> None:
        updates.send(Phase(name, fraction))

    report(f"importing the {settings.engine} engine", None)
    started = time.perf_counter()
    try:
        engine = engine_module(settings.engine).load(settings, report)
    except EngineError as error:
        updates.send(Broken(str(error)))
        sys.exit(EXIT_BROKEN)
    # A load leaves a million objects that stay: to look through them again, as the collector does now and then, takes
    # as long as several steps.
    gc.collect()
    gc.freeze()
    updates.send(Ready(engine.card, time.perf_counter() - started))
    try:
        StepLoop(engine, commands, updates.send, settings.run_ahead_steps).run()
    finally:
        engine.close()


def set_up_process() -> None:
    """What a process needs to have set before it loads an engine: signals, a name in `ps`, how OpenMP waits."""
    # Ctrl-C goes to every process of the terminal; what becomes of the riders is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("carpool-model", encoding="ascii")  # At most 15 characters.
    # OpenMP's threads spin while they wait for each other: good on free cores, but where another process wants them
    # too, a thread that spins keeps away the very thread it waits for. A bounded spin is as fast on free cores and
    # loses less beside others. OpenMP reads this when an engine loads it.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def engine_module(name: EngineName) -> EngineModule:
    """Import an engine.

    Raises:
        EngineError: this release or this environment does not have it.
    """
    module = ENGINE_MODULES[name]
    try:
        return cast(EngineModule, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name == module:
            raise EngineError(f"this release has no engine {name!r}: set CARPOOL_ENGINE to another one") from error
        raise EngineError(
            f"the engine {name!r} needs the package {error.name!r}, which is not installed: "
            f"pip install 'carpool[{name}]', or set CARPOOL_ENGINE=simulated"
        ) from error


def _fitting_max_tokens(command: Add, prompt_tokens: int, context_length: int) -> int:
    """The sequence's max_tokens; a default one is cut down to what the context leaves.

    Raises:
        SequenceError: prompt and completion do not fit.
    """
    rest = context_length - prompt_tokens
    wanted = command.params.max_tokens
    if rest < 1:
        raise SequenceError(
            "context_length_exceeded",
            f"the prompt has {prompt_tokens} tokens, the model's context length is {context_length}: "
            "no token of a completion fits. Shorten the prompt",
        )
    if wanted is None or (wanted > rest and command.max_tokens_is_default):
        return rest
    if wanted > rest:
        raise SequenceError(
            "context_length_exceeded",
            f"the prompt's {prompt_tokens} tokens and max_tokens {wanted} make {prompt_tokens + wanted}, "
            f"the model's context length is {context_length}. Shorten the prompt, or set max_tokens to at most {rest}",
        )
    return wanted
