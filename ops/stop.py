"""`carpool stop`: a running instance drains at its own supervisor's hand."""

from __future__ import annotations

from ops.errors import ExitCode, OperationError
from ops.instance import DataDir, RunFile
from ops.process import wait_until_ended
from ops.redis_guardian import MARGIN_S, STOP_S
from ops.up import API_STOP_S


def stop_instance(data: DataDir) -> None:
    """Send the supervisor SIGTERM and wait until it has ended.

    Raises:
        OperationError: none runs, or it takes longer than its drain may take.
    """
    run = RunFile.read(data.run_file)
    supervisor = run.supervisor.identity if run is not None and run.supervisor is not None else None
    process = supervisor.process() if supervisor is not None else None
    if run is None or supervisor is None or process is None:
        raise OperationError(f"No instance runs in {data.root}", "Name one with --data-dir", ExitCode.NOT_RUNNING)
    process.terminate()
    bound_s = run.drain_s + MARGIN_S + API_STOP_S + STOP_S + 10
    if wait_until_ended([supervisor], bound_s):
        raise OperationError(
            f"The instance still drains after {bound_s:g} s", f"Stop it at once: kill {supervisor.pid}"
        )
