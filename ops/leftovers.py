"""Says which processes of an environment still live: after a test run there must be none.

`python -m ops.leftovers FOLDER` exits 1 and lists them where some do not end within a few seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil

from ops.process import ProcessIdentity, wait_until_ended

_WAIT_S = 5.0


def processes_of(folder: str) -> Iterator[tuple[ProcessIdentity, str]]:
    """Living processes, but this one and its parents, whose command names a file in `folder`; and the command."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(process.cmdline())  # empty of a zombie
            if process.pid not in own and folder in command:
                yield ProcessIdentity.of(process.pid), command


def main() -> None:
    """Entry point."""
    found = dict(processes_of(sys.argv[1]))
    alive = wait_until_ended(list(found), _WAIT_S)
    for identity in alive:
        sys.stderr.write(f"left behind: {identity.pid} {found[identity]}\n")
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()
