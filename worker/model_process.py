"""One incarnation of the Model worker, as its parent holds it: the process, its two pipes, and why it died."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Final, TypeAlias

from tasks.logs import configure_logging
from tasks.process_name import process_name
from tasks.settings import Settings
from worker import messages
from worker.channel import CommandWriter, UpdateReader, UpdateWriter
from worker.messages import Aborted, Add, Broken, Command, Failed, Phase, Ready, Stepped, Update
from worker.model_worker import EXIT_BROKEN

PROCESS_NAME: Final = "carpool-model-worker"
#: How long a child may take to exit after it has closed its pipe.
_EXIT_S: Final = 5.0

ChildMain: TypeAlias = "Callable[[Settings, Connection[Any, Any], Connection[Any, Any]], None]"


class ModelProcess:
    """A started child. Its updates are read by one thread; `send`, `terminate` and `kill` may come from any.

    Raises:
        OSError: the system has no process or pipe to give.
    """

    def __init__(self, settings: Settings, generation: int, main: ChildMain) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # CUDA does not survive a fork, and a fork would copy our threads.
        command_pipe, command_end = context.Pipe(duplex=False)
        update_end, update_pipe = context.Pipe(duplex=False)
        self.generation = generation
        self.is_ready = False
        self._doing = "starting"
        self._riders: set[str] = set()
        # A daemonic process may have no children, and vLLM has one per GPU for tensor parallelism.
        self._process = context.Process(
            target=_begin,
            args=(messages.VERSION, main, settings, command_pipe, update_pipe),
            name=PROCESS_NAME,
            daemon=False,
        )
        try:
            self._process.start()
        except OSError:
            command_end.close()
            update_end.close()
            raise
        finally:
            # The child's ends must be open in the child alone, or its death would be no end of file here.
            command_pipe.close()
            update_pipe.close()
        # A parent that ends without `close` ends the child too, and does not wait for it.
        atexit.register(self.kill)
        self._commands = CommandWriter(command_end, name=f"command-writer-{generation}")
        self._updates = UpdateReader(update_end, self._process.sentinel)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self._riders.add(command.id)
        self._commands.send(command)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def updates(self) -> Iterator[Update]:
        """Every update, until the child is dead and all that it sent has been read."""
        for update in self._updates:
            self._note(update)
            yield update
        if not wait([self._process.sentinel], _EXIT_S):
            self.kill()

    def reap(self) -> str:
        """Wait for the end of a dying child and close its pipes; returns why it died and while doing what."""
        self._process.join()
        atexit.unregister(self.kill)
        self._commands.close()
        self._updates.close()
        cause = f"{_exit_text(self._process.exitcode)} while {self._doing_now()}"
        self._process.close()
        return cause

    def _note(self, update: Update) -> None:
        match update:
            case Stepped():
                self._riders.difference_update([delta.id for delta in update.deltas if delta.finish is not None])
            case Aborted() | Failed():
                self._riders.discard(update.id)
            case Phase():
                self._doing = update.name
            case Ready():
                self.is_ready = True

    def _doing_now(self) -> str:
        if not self.is_ready:
            return self._doing
        return "decoding" if self._riders else "idle"


def _begin(
    parents_version: int,
    main: ChildMain,
    settings: Settings,
    command_pipe: Connection[Any, Any],
    update_pipe: Connection[Any, Any],
) -> None:
    """Body of the child. It has imported everything anew, maybe from another release's files than its parent."""
    configure_logging(settings, "model-worker", f"{process_name('worker')}/model")
    if parents_version != messages.VERSION:
        UpdateWriter(update_pipe).send(
            Broken(
                f"this worker's messages have version {parents_version}, those of the files that it was started from "
                f"have {messages.VERSION}: Carpool was upgraded under it. Start the worker again"
            )
        )
        sys.exit(EXIT_BROKEN)
    try:
        main(settings, command_pipe, update_pipe)
    except Exception as error:
        # multiprocessing would print it, and not ask the hook
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from error


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}  # Real-time signals have none.
        return f"signal {-exit_code} ({names.get(-exit_code, 'no name')})"
    return f"exit code {exit_code}"
