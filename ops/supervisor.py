"""The supervisor behind `carpool up`: brings the parts up in order, keeps them alive, drains them in order.

Order of start: workers and Redis side by side (a worker loads its model while it waits for Redis), then the API. Order
of the drain: workers, then API, webhooks and Flower, then Redis, so that everyone can write down how far it came. Every
child leads a session of its own, so Ctrl-C in the terminal reaches the supervisor alone; a supervisor that is killed is
noticed by its children (`tasks/lifeline.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ops.child import Child, ChildSpec
from ops.display import Display
from ops.errors import ExitCode, OperationError, PreconditionError
from ops.instance import DataDir, ProcessEntry, RunFile
from ops.log_lines import supervisor_line
from ops.logs import ChildLog
from ops.process import ProcessIdentity
from ops.readiness import Readiness
from tasks.codes import CarpoolError
from tasks.redis_clients import check_server, connect
from tasks.settings import Settings

_ROTATE_S = 60.0
_DRAIN_ORDER: tuple[tuple[str, ...], ...] = (("worker",), ("api", "webhooks", "flower"), ("redis",))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        settings: with the addresses that were found; the children get the same.
        redis: the embedded server's guardian, or None where a server was named.
        others: API, workers, webhooks and Flower.
        flower_port: where Flower will listen, if it is among them.
        notes: further rows of the closing box.
    """

    settings: Settings
    data: DataDir
    run_file: RunFile
    redis: ChildSpec | None
    others: tuple[ChildSpec, ...]
    flower_port: int | None = None
    notes: tuple[tuple[str, str], ...] = ()


class Supervisor:
    """Runs a plan until a signal ends it or one of its parts is given up. Use it once, inside a running event loop."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._run_file = plan.run_file
        self._readiness = Readiness(plan.settings, plan.run_file, display, plan.flower_port)
        self._children: list[Child] = []
        self._lives: list[asyncio.Task[None]] = []
        self._signal: signal.Signals | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_once = asyncio.Event()

    async def run(self) -> ExitCode:
        """Bring everything up and stay until the end.

        Returns:
            OK after a drain; INTERRUPTED or TERMINATED after a stop at once.

        Raises:
            OperationError: a part was given up; everything else has been drained.
        """
        self._log("supervisor").start()
        self._install_signal_handlers()
        own = ProcessIdentity.of(os.getpid())
        self._record(ProcessEntry("supervisor", "supervisor", "running", own.pid, own.created))
        tasks = [asyncio.create_task(self._bring_up()), asyncio.create_task(self._rotate_logs())]
        for task in tasks:
            task.add_done_callback(self._on_end_of_task)
        try:
            await self._end
            drain_s = self._plan.settings.drain_s
            self._display.note(f"Draining: riding sequences get up to {drain_s:g} s. Ctrl-C stops at once.")
        except OperationError as error:
            self._display.warn(f"{error.cause}. Draining the other parts. Ctrl-C stops at once.")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            cut_short = await self._drain()
            self._record(ProcessEntry("supervisor", "supervisor", "stopped", own.pid, own.created))
        if cut_short:
            return ExitCode.INTERRUPTED if self._signal is signal.SIGINT else ExitCode.TERMINATED
        self._display.note("Stopped.")
        return ExitCode.OK

    async def _bring_up(self) -> None:
        plan, readiness = self._plan, self._readiness
        # models take longest to load, and need no Redis for that
        self._start_all([spec for spec in plan.others if spec.role == "worker"])
        if plan.redis is not None:
            redis = self._start(plan.redis)
            await readiness.await_redis(redis)
            await asyncio.to_thread(self._check_ledger)
            self._display.done("redis", f"embedded, in {plan.data.redis}")
        self._start_all([spec for spec in plan.others if spec.role != "worker"])
        await asyncio.gather(readiness.watch(self._children), self._show_box())

    def _start_all(self, specs: Sequence[ChildSpec]) -> None:
        for spec in specs:
            self._display.phase(spec.name, "starting")
            self._start(spec)

    def _start(self, spec: ChildSpec) -> Child:
        log = self._log(spec.name)
        log.start()
        child = Child(spec, log, self._on_change)
        self._children.append(child)
        life = asyncio.create_task(child.run(), name=spec.name)
        life.add_done_callback(self._on_end_of_task)
        self._lives.append(life)
        return child

    def _check_ledger(self) -> None:
        """A data dir that a newer release has written is refused."""
        try:
            with connect(self._plan.settings) as client:
                check_server(client, self._plan.settings.redis_url)
        except CarpoolError as error:
            raise PreconditionError(error.message, "") from error

    async def _show_box(self) -> None:
        for child in self._children:
            await child.until_ready()
        url = self._plan.run_file.api_url
        body = "-H 'content-type: application/json' -d '{\"prompt\": \"Hello, I am\"}'"
        self._display.box(
            f"Carpool is ready: {self._readiness.models or 'no worker of its own'}. Ctrl-C drains and stops.",
            [
                ("page", f"{url}/"),
                ("API docs", f"{url}/docs"),
                ("health", f"{url}/health/ready"),
                *self._plan.notes,
                ("logs", str(self._plan.data.logs)),
            ],
            [("Stream a completion", f"curl -N {url}/generate_stream {body}")],
        )

    # --- what happens ---------------------------------------------------------------------------------------------

    def _on_change(self, entry: ProcessEntry) -> None:
        self._record(entry)
        if entry.state == "starting" and entry.role == "worker":
            self._readiness.worker_started()
        elif entry.state == "restarting":
            self._display.forget(entry.name)
            self._display.warn(f"{entry.name} died ({entry.cause}): it is started again")
        elif entry.state in ("stopped", "failed"):
            self._display.forget(entry.name)

    def _on_end_of_task(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, signal.SIGINT)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's word stands
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)

    def _on_signal(self, sig: signal.Signals) -> None:
        self._signal = sig
        if self._end.done():
            self._at_once.set()
        else:
            self._end.set_result(None)

    # --- drain ----------------------------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """Let all parts end in order; True where a further signal cut that short."""
        in_order = asyncio.create_task(self._stop_in_order())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({in_order, at_once}, return_when=asyncio.FIRST_COMPLETED)
        cut_short = not in_order.done()
        if cut_short:
            self._display.warn("Stopping at once.")
            for child in self._children:
                child.kill()
        at_once.cancel()
        await asyncio.gather(in_order, at_once, *self._lives, return_exceptions=True)
        return cut_short

    async def _stop_in_order(self) -> None:
        for roles in _DRAIN_ORDER:
            await asyncio.gather(*(child.stop() for child in self._children if child.spec.role in roles))

    # --- records --------------------------------------------------------------------------------------------------

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_S)
            for name in ("supervisor", *(child.spec.name for child in self._children)):
                self._log(name).rotate_if_large()

    def _log(self, name: str) -> ChildLog:
        return ChildLog(self._plan.data.logs / f"{name}.log")

    def _record(self, entry: ProcessEntry) -> None:
        self._run_file = self._run_file.with_process(entry)
        self._run_file.write(self._plan.data.run_file)
        cause = {"cause": entry.cause} if entry.cause else {}
        line = supervisor_line("process_state", process=entry.name, pid=entry.pid, state=entry.state, **cause)
        self._log("supervisor").append(line)
