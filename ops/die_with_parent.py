"""A program that becomes another one, after asking the kernel to signal it when its parent ends (prctl(2), Linux).

`python -I -S die_with_parent.py SIGNAL PARENT_PID COMMAND…`. The request outlives exec, the process id stays the same.
A `preexec_fn` would do it without a second program, but may deadlock in a parent that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arm the signal and become the command; does not return."""
    sig = int(arguments[0])
    # The interpreter ignores it, and what is ignored stays so over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if os.getppid() != int(arguments[1]):  # it died before the call: the kernel will not tell any more
        sys.exit(f"die_with_parent: parent {arguments[1]} has already ended")
    os.execvp(arguments[2], arguments[2:])  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main(sys.argv[1:])
