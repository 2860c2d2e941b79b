"""How a child notices that its supervisor was killed: a pipe whose only writer is the supervisor.

The supervisor keeps the write end and passes the read end on; its number stands in CARPOOL_LIFELINE_FD. Nothing is ever
written: the end of the file, which the kernel delivers however the supervisor died, is the message.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, MutableMapping

LIFELINE_VARIABLE = "CARPOOL_LIFELINE_FD"


def terminate_self() -> None:
    """Send this process SIGTERM: it drains as it would at its supervisor's word."""
    os.kill(os.getpid(), signal.SIGTERM)


def watch_lifeline(
    on_death: Callable[[], None] = terminate_self,
    *,
    kill_after_s: float | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> threading.Thread | None:
    """Call `on_death` once, in a thread of its own, when the supervisor has ended.

    Call it once, after the handler of SIGTERM is in place. It takes the variable out of `environ` and makes the
    descriptor private, so that children of this process neither inherit nor watch it.

    Args:
        kill_after_s: seconds after `on_death` at which a process that is still there kills itself; None: never.

    Returns:
        The daemon thread that waits, or None where no supervisor passed a lifeline on.

    Raises:
        ValueError: the variable holds no open descriptor.
    """
    given = environ.pop(LIFELINE_VARIABLE, None)
    if given is None:
        return None
    try:
        descriptor = int(given)
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{LIFELINE_VARIABLE}={given!r} is no open descriptor ({error}). It is for the supervisor alone: unset it"
        ) from None

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os.close(descriptor)
        on_death()
        if kill_after_s is not None:
            time.sleep(kill_after_s)  # the bound of the drain: a process that ended in time never comes back from here
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=wait, name="lifeline", daemon=True)
    thread.start()
    return thread
