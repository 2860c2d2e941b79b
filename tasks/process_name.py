"""How this process is called: by its supervisor, or by its host."""

from __future__ import annotations

import os
import socket
from typing import Final

#: Set by the supervisor for each process that it starts.
PROCESS_NAME_VARIABLE: Final = "CARPOOL_PROCESS_NAME"


def process_name(role: str) -> str:
    """The name that the supervisor gave, else the role and the host's name."""
    return os.environ.get(PROCESS_NAME_VARIABLE) or f"{role}-{socket.gethostname()}"
