"""What a bench found: figures with their targets, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from ops.text import table

VERSION: Final = 1
#: Packages whose versions move the figures.
_PACKAGES: Final = ("carpool", "celery", "kombu", "redis", "fastapi", "uvicorn", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to be, compared with `bound`."""

    relation: Literal[">=", ">", "<="]
    bound: float

    def holds(self, value: float) -> bool:
        match self.relation:
            case ">=":
                return value >= self.bound
            case ">":
                return value > self.bound
            case "<=":
                return value <= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(">=", bound)


def more_than(bound: float) -> Target:
    return Target(">", bound)


def at_most(bound: float) -> Target:
    return Target("<=", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a bench.

    Attributes:
        samples: what `value` was taken from, in the order of measurement; empty where it is the measurement itself.
        target: None where the figure only explains another.
    """

    name: str
    value: float
    unit: str
    target: Target | None = None
    samples: tuple[float, ...] = ()

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.target.holds(self.value)


def median_of(name: str, samples: Sequence[float], unit: str, target: Target | None = None) -> Figure:
    """The median as a figure."""
    return Figure(name, median(samples), unit, target, tuple(samples))


def ratio_of(name: str, ours: Sequence[float], theirs: Sequence[float], target: Target | None = None) -> Figure:
    """The median of the ratios round by round, so that a machine that changes its speed changes both sides."""
    return median_of(name, [one / other for one, other in zip(ours, theirs, strict=True)], "x", target)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The least sample that so many percent of all do not exceed."""
    return percentile_of(sorted(samples), percent)


def percentile_of(ordered: Sequence[float], percent: float) -> float:
    """The same of samples that are sorted already."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def print_report(
    bench: str,
    figures: Sequence[Figure],
    setup: Mapping[str, Any],
    *,
    quick: bool,
    load_at_start: float,
    json_file: Path | None,
    write: Callable[[str], None] = print,
) -> None:
    """Show the table, and write the JSON file where one is wanted.

    Args:
        setup: what was measured: engine, clients, lengths.
        load_at_start: the machine's load before the bench put its own on it.
    """
    rows = [
        [figure.name, _shown(figure.value), figure.unit, str(figure.target or ""), "" if quick else _word(figure.holds)]
        for figure in figures
    ]
    write(table(["FIGURE", "VALUE", "UNIT", "TARGET", "HOLDS"], rows))
    write(f"{len(os.sched_getaffinity(0))} cores, load before the start {load_at_start:.1f}")
    if quick:
        write("--quick: this shows that the bench works, the figures mean nothing")
    if json_file is not None:
        report = {
            "v": VERSION,
            "bench": bench,
            "measured_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "quick": quick,
            "machine": machine(load_at_start),
            "setup": dict(setup),
            "figures": [_figure(figure, quick) for figure in figures],
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _figure(figure: Figure, quick: bool) -> dict[str, Any]:
    return {
        "name": figure.name,
        "value": _rounded(figure.value),
        "unit": figure.unit,
        "target": None if figure.target is None else str(figure.target),
        "holds": None if quick else figure.holds,
        "samples": [_rounded(sample) for sample in figure.samples],
    }


def machine(load_at_start: float) -> dict[str, Any]:
    """What the figures depend on: processor, system, versions."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "load_at_start": round(load_at_start, 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _word(holds: bool | None) -> str:
    return {None: "", True: "yes", False: "NO"}[holds]
