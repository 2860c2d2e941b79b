"""The instance that a bench measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ops.private_instance import PrivateInstance

#: Nothing rides when a bench ends that anybody waits for.
_DRAIN_S: Final = 2


class BenchInstance(PrivateInstance):
    """A private instance that ends soon.

    Args:
        settings: those that differ from the defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__({"drain_s": _DRAIN_S, **settings}, "bench")
