"""Names to addresses, with a bound on the wait: the C library's own can be half a minute."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """An address to connect to; `sockaddr` holds it as numbers, so that nothing is resolved again."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]

    @property
    def host(self) -> str:
        return str(self.sockaddr[0])


def resolve(host: str, port: int, timeout_s: float) -> Sequence[SocketAddress]:
    """Every address of a name, or the one that it is.

    Raises:
        TimeoutError: not within `timeout_s`; the thread that asks goes on until the C library gives up.
        OSError: there is none.
    """
    answers: queue.SimpleQueue[Sequence[SocketAddress] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            # as bytes: a str would be put through IDNA once more
            found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            answers.put(error)
            return
        known = (socket.AF_INET, socket.AF_INET6)
        answers.put([SocketAddress(family, sockaddr) for family, _, _, _, sockaddr in found if family in known])

    threading.Thread(target=ask, name="carpool-resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer
