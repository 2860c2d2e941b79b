"""Body of `carpool bench`: look at the servers, measure, and show what was found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ops.bench.serving.plan import Plan, usage_error
from ops.bench.serving.plot import render_svg
from ops.bench.serving.records import read_records
from ops.bench.serving.report import Measurement, render, to_json
from ops.bench.serving.runner import Runner, Side
from ops.bench.serving.target import Target
from ops.bench.serving.workload import Prompt, Workload
from ops.display import Display, is_fancy
from ops.errors import ExitCode, OperationError

_NAME: Final = "bench"
#: For what the service tells of its jobs; less where somebody waits for the prompt.
_RECORDS_S: Final = 20.0
_STOPPED_S: Final = 3.0


def run_bench(
    plan: Plan,
    targets: Sequence[Target],
    prompts: Sequence[Prompt],
    prompts_name: str,
    json_file: Path | None,
    plot_file: Path | None,
    write: Callable[[str], None],
) -> ExitCode:
    """Measure one target, or two in turn. The first Ctrl-C ends the measurement, and what there is is shown.

    Args:
        prompts: the data set; empty where prompts are made up.
        prompts_name: what the tables call the prompts.

    Raises:
        OperationError: a target does not answer, a file cannot be written, or no request was answered.
    """
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        _check_writable(option, file)
    if len({target.name for target in targets}) < len(targets):
        targets[-1].name += " (against)"
    load = os.getloadavg()[0]
    sides = [Side(target, Workload(plan, prompts)) for target in targets]
    runner = asyncio.run(_measure(plan, sides))
    measurement = Measurement(plan, sides, runner.lags, runner.was_stopped, load, prompts_name)
    write(render(measurement))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(measurement), indent=1) + "\n")
    if plot_file is not None:
        plot_file.write_text(render_svg(measurement))
    if runner.was_stopped:
        return ExitCode.INTERRUPTED
    silent = next((side for side in sides if not any(outcome.succeeded for outcome in side.outcomes)), None)
    if silent is not None:
        raise OperationError(f"{silent.target.url} answered no request well", "The lines above say what it did")
    return ExitCode.OK


async def _measure(plan: Plan, sides: Sequence[Side]) -> Runner:
    fancy = is_fancy(sys.stderr)
    display = Display(sys.stderr, fancy=fancy)

    def on_progress(share: float, ended: int, failed: int) -> None:
        display.phase(_NAME, f"{ended} requests, {failed} failed," if fancy else "measuring", share)

    runner = Runner(plan, sides, on_progress)
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        runner.stop()
        loop.remove_signal_handler(signal.SIGINT)  # the second one ends this process as it ends any other

    try:
        for side in sides:
            await side.target.look()
        display.phase(_NAME, "warming up")
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        await runner.run()
        for side in sides:
            await read_records(side.target, side.outcomes, _STOPPED_S if runner.was_stopped else _RECORDS_S)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        display.forget(_NAME)
        for side in sides:
            side.target.close()
    return runner


def _check_writable(option: str, file: Path | None) -> None:
    """Before the measurement, not after it."""
    if file is None:
        return
    if option == "--plot" and file.suffix.lower() != ".svg":
        raise usage_error(f"--plot {file} is no .svg file", "Only SVG is drawn: name one")
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise usage_error(f"{option} {file} cannot be written: {error.strerror}", "Name another file") from error


def parse_body(text: str) -> dict[str, Any]:
    """Further fields of every request. Raises OperationError."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise usage_error(f"--body is no JSON: {error}", """Write --body '{"ignore_eos": true}'""") from error
    if not isinstance(fields, dict):
        raise usage_error("--body is no JSON object", """Write --body '{"ignore_eos": true}'""")
    return fields
