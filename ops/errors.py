"""What the command line can fail with: one line with the cause, one thing to do, and an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `carpool`; docs/cli.md has the same table."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PRECONDITION = 3
    NOT_RUNNING = 4
    NOT_READY = 5
    UNAVAILABLE = 75
    INTERRUPTED = 130
    TERMINATED = 143


class OperationError(Exception):
    """Something the user can mend.

    Args:
        cause: what is wrong, with the value.
        fix: one thing to do, as an imperative or a command; "" where the cause has it in it.
        exit_code: what the process ends with.
        details: further lines, such as the end of a log.
    """

    def __init__(
        self, cause: str, fix: str, exit_code: ExitCode = ExitCode.FAILED, *, details: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{cause}. {fix}" if fix else cause)
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code
        self.details = details


class PreconditionError(OperationError):
    """Nothing was started, since it could not have worked."""

    def __init__(self, cause: str, fix: str, *, details: tuple[str, ...] = ()) -> None:
        super().__init__(cause, fix, ExitCode.PRECONDITION, details=details)
