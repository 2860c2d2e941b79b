"""What the benches have in common as commands: options, a clean environment, and how an error is shown."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.report import Figure, print_report
from ops.errors import OperationError
from ops.private_instance import KEPT
from ops.text import print_error
from tasks.codes import CarpoolError
from tasks.settings import BUNDLED_MODEL, PREFIX, SettingsError


@dataclass(frozen=True, slots=True)
class Options:
    """What a bench was asked for.

    Attributes:
        quick: a few tokens on the simulated engine, to see that the bench works.
        rounds: how often both sides are measured in turn.
    """

    quick: bool
    json_file: Path | None
    rounds: int
    engine: str
    model: str
    dtype: str
    device: str

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The settings that choose engine and model."""
        if self.engine == "simulated":
            return {"engine": "simulated"}
        return {"engine": self.engine, "model": self.model, "dtype": self.dtype, "device": self.device}


@dataclass(frozen=True, slots=True)
class Findings:
    """What a bench measured, and on what."""

    figures: Sequence[Figure]
    setup: Mapping[str, Any]


def run_bench(name: str, description: str | None, measure: Callable[[Options], Findings], *, engine: str) -> None:
    """Body of `python -m ops.bench.<name>`; ends the process with exit code 1 where the bench could not be run.

    A missed target is no error: the table says so.

    Args:
        engine: the one to measure where none is named.
    """
    options = _parse(name, description, engine)
    for key in [key for key in os.environ if key.startswith(PREFIX) and key not in KEPT]:
        del os.environ[key]
    load = os.getloadavg()[0]
    try:
        findings = measure(options)
    except OperationError as error:
        print_error(error.cause, error.fix, error.details)
        sys.exit(1)
    except (SettingsError, CarpoolError) as error:
        print_error(str(error))
        sys.exit(1)
    setup = {"rounds": options.rounds, **options.engine_settings, **findings.setup}
    print_report(name, findings.figures, setup, quick=options.quick, load_at_start=load, json_file=options.json_file)


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _parse(name: str, description: str | None, engine: str) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m ops.bench.{name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=None, help="measurements of each side, in turn (5)")
    parser.add_argument("--quick", action="store_true", help="see that it works: simulated engine, a few tokens")
    parser.add_argument("--engine", default=engine, help=f"engine to measure ({engine})")
    parser.add_argument("--model", default=BUNDLED_MODEL, help=f"model to measure ({BUNDLED_MODEL})")
    parser.add_argument("--dtype", default="auto", help="number format of the weights (auto)")
    parser.add_argument("--device", default="auto", help="device to measure on (auto)")
    given = parser.parse_args()
    rounds = given.rounds if given.rounds is not None else (1 if given.quick else 5)
    if rounds < 1:
        parser.error(f"--rounds {rounds}: at least one is needed")
    return Options(
        quick=given.quick,
        json_file=given.json,
        rounds=rounds,
        engine="simulated" if given.quick else given.engine,
        model=given.model,
        dtype=given.dtype,
        device=given.device,
    )
