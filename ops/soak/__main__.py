"""`ops/chaos`: random jobs, clients that drop and resume, and random kills of every kind, for some minutes.

Starts a private `carpool up` with the simulated engine, whose right answers can be computed, torments it, lets it
settle, and compares. Exit codes: 0 where everything holds, 1 where something is wrong, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from ops.errors import ExitCode, OperationError
from ops.soak.faults import WEIGHTS
from ops.soak.report import print_report
from ops.soak.run import Options, run_soak
from ops.text import print_error


def main() -> None:
    """Entry point."""
    options, json_file = _parse(sys.argv[1:])
    try:
        outcome = run_soak(options)
    except OperationError as error:
        print_error(error.cause, error.fix, error.details)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("Stopped; nothing was judged.\n")
        sys.exit(ExitCode.INTERRUPTED)
    print_report(outcome, json_file)
    sys.exit(ExitCode.OK if outcome.verdict.holds else ExitCode.FAILED)


def _parse(arguments: list[str]) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(
        prog="ops/chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults come (2)")
    parser.add_argument("--seed", type=int, default=1, help="of jobs, cuts and faults (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--clients", type=int, default=24, help="how many ask at once (24)")
    parser.add_argument("--workers", type=int, default=2, help="generation workers (2)")
    parser.add_argument("--gap", type=float, default=3.0, help="seconds between two faults, on average (3)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a decoding step (10)")
    parser.add_argument(
        "--only", default="", metavar="KINDS", help=f"kinds of faults, comma separated: {', '.join(WEIGHTS)}"
    )
    parser.add_argument("--no-poison", action="store_true", help="no prompts that kill or hang the model process")
    parser.add_argument("--default-settings", action="store_true", help="leases and timeouts as the product has them")
    parser.add_argument("--appendfsync", choices=("always", "everysec"), default="always", help="of Redis (always)")
    parser.add_argument("--keep", action="store_true", help="leave the instance's files where they are")
    given = parser.parse_args(arguments)
    kinds = tuple(kind.strip() for kind in given.only.split(",") if kind.strip())
    for kind in kinds:
        if kind not in WEIGHTS:
            parser.error(f"--only {kind}: it is none of {', '.join(WEIGHTS)}")
    for name in ("minutes", "clients", "workers", "gap"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name} {getattr(given, name)}: it has to be more than 0")
    options = Options(
        minutes=given.minutes,
        seed=given.seed,
        clients=given.clients,
        workers=given.workers,
        gap_s=given.gap,
        step_ms=given.step_ms,
        kinds=kinds,
        poison=not given.no_poison,
        default_settings=given.default_settings,
        appendfsync=given.appendfsync,
        keep=given.keep,
    )
    return options, given.json


if __name__ == "__main__":
    main()
