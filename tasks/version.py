"""Which release of Carpool this is."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def carpool_version() -> str:
    """The version of the installed distribution; "unknown" where the sources run without one."""
    try:
        return importlib.metadata.version("carpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
