"""What `carpool bench` is asked for: the load, its lengths, its bounds, and what counts as good."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from ops.errors import ExitCode, OperationError

Endpoint = Literal["jobs", "completions", "chat"]
Criterion = Literal["ttft", "itl", "tpot", "e2e"]

ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)
CRITERIA: Final[tuple[Criterion, ...]] = get_args(Criterion)
#: An open loop that nobody answers must not use up this machine's descriptors.
MOST_AT_ONCE: Final = 1000
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)")


def usage_error(cause: str, fix: str) -> OperationError:
    """An option that cannot be used."""
    return OperationError(cause, fix, ExitCode.USAGE)


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, option: str, text: str) -> Span:
        """Read "64" or "32..128". Raises OperationError."""
        least, dots, most = text.partition("..")
        try:
            span = cls(int(least), int(most if dots else least))
        except ValueError as error:
            raise usage_error(f"{option} {text!r} is no number of tokens", "Write 64, or 32..128") from error
        if not 1 <= span.least <= span.most:
            raise usage_error(f"{option} {text!r} is empty or below 1", "Write the lower number first: 32..128")
        return span

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def parse_duration(option: str, text: str) -> float:
    """Seconds of "200ms", "1.5s" or "2m". Raises OperationError."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= 86400:
        raise usage_error(f"{option} {text!r} is no duration", "Write a number with its unit: 200ms, 30s or 5m")
    return seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to hold to be good: upper bounds in seconds, by criterion. Empty where nothing was asked."""

    bounds: Mapping[Criterion, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read "ttft=200ms,itl=50ms". Raises OperationError."""
        bounds: dict[Criterion, float] = {}
        for pair in filter(None, (one.strip() for one in text.split(","))):
            name, _, bound = pair.partition("=")
            criterion = next((one for one in CRITERIA if one == name.strip()), None)
            if criterion is None or criterion in bounds:
                raise usage_error(
                    f"--slo {pair!r} is none of ttft, itl, tpot, e2e, each once", "Write ttft=200ms,itl=50ms"
                )
            bounds[criterion] = parse_duration(f"--slo {name}", bound)
        return cls(bounds)

    def __str__(self) -> str:
        return ", ".join(f"{name} {1000 * bound:g} ms" for name, bound in self.bounds.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """One load. It is bounded in count and in time, whatever the server does.

    Attributes:
        clients: in a closed loop, how many ask at a time; in an open one, the most that may be under way.
        rate: requests a second of an open loop; None for a closed one.
        burstiness: of the arrivals: 1 is Poisson, less is burstier, more is steadier.
        requests: most requests of each side.
        duration_s: no request of a side begins after so many seconds.
        timeout_s: the most that one request may take.
        warmups: requests that come first and are not counted.
        rounds: how often two sides are measured in turn.
        body: further fields of every request.
    """

    clients: int = 4
    rate: float | None = None
    burstiness: float = 1.0
    requests: int = 100
    duration_s: float = 600.0
    timeout_s: float = 300.0
    warmups: int = 2
    rounds: int = 1
    prompt_tokens: Span = Span(128, 128)
    max_tokens: Span = Span(128, 128)
    temperature: float = 0.0
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises OperationError for what cannot be used."""
        for option, value, least, most in (
            ("--clients", self.clients, 1, MOST_AT_ONCE),
            ("--rate", self.rate if self.rate is not None else 1.0, 0.001, 10000),
            ("--burstiness", self.burstiness, 0.01, 1000),
            ("--requests", self.requests, 1, 1_000_000),
            ("--ignore", self.warmups, 0, 10_000),
            ("--rounds", self.rounds, 1, 1000),
            ("--temperature", self.temperature, 0, 100),
        ):
            if not math.isfinite(value) or not least <= value <= most:
                raise usage_error(f"{option} {value:g} is not from {least:g} to {most:g}", "Choose one that is")
        if self.rounds > self.requests:
            raise usage_error(
                f"--rounds {self.rounds} are more than the {self.requests} requests", "Ask for fewer rounds"
            )
