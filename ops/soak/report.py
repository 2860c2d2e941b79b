"""The report of a soak: a table for people, JSON for programs, and what is needed to look into what is wrong."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench.report import percentile
from ops.soak.faults import KILLS, count_by_kind
from ops.soak.judge import Finding, Verdict
from ops.soak.observations import FAULT_KINDS, LedgerJob, Sighting, Strike
from ops.soak.recovery import Recovery
from ops.text import table

VERSION: Final = 1
_SHOWN_FINDINGS: Final = 20
_LOG_END: Final = 4
_SHOWN_SLOW: Final = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a soak saw.

    Attributes:
        options: what it was asked for, with the seed that draws the same plans and faults again.
        num_killed: processes that got SIGKILL, by role.
        recoveries: of each job that a fault met, and of each stream that one cut.
        settled_s: how long it took after the last fault until every job had ended.
    """

    options: Mapping[str, Any]
    sightings: Sequence[Sighting]
    jobs: Mapping[str, LedgerJob]
    strikes: Sequence[Strike]
    num_killed: Mapping[str, int]
    recoveries: Sequence[Recovery]
    settled_s: float
    verdict: Verdict


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The report for programs."""
    sightings, jobs = outcome.sightings, outcome.jobs
    return {
        "v": VERSION,
        "options": dict(outcome.options),
        "holds": outcome.verdict.holds,
        "requests": len(sightings),
        "accepted": sum(sighting.accepted_at is not None for sighting in sightings),
        "jobs": len(jobs),
        "jobs_by_status": dict(sorted(Counter(job.status for job in jobs.values()).items())),
        "requests_by_way": dict(sorted(Counter(sighting.plan.way for sighting in sightings).items())),
        "tokens": sum(job.k for job in jobs.values()),
        "rides": sum(job.rides for job in jobs.values()),
        "faults": count_by_kind(outcome.strikes),
        "kills": sum(strike.kind in KILLS for strike in outcome.strikes),
        "processes_killed": dict(outcome.num_killed),
        "resumes": {
            "cut by the client": sum(sighting.cuts for sighting in sightings),
            "cut by a fault": sum(sighting.breaks for sighting in sightings),
        },
        **{kind: outcome.verdict.count(kind) for kind in FAULT_KINDS},
        "lost_writes": len(outcome.verdict.lost_writes),
        "death_bound": list(outcome.verdict.death_bound),
        "recovery_s": _recoveries(outcome.recoveries),
        "recovery_alone_s": _recoveries(_met_by_one_fault(outcome)),
        "settled_s": round(outcome.settled_s, 1),
        "timeline": [[round(strike.at, 2), strike.kind, strike.what] for strike in outcome.strikes],
        "slow": _slowest(outcome),
        "findings": [_finding(finding, outcome) for finding in outcome.verdict.findings],
        "findings_of_lost_writes": [_finding(finding, outcome) for finding in outcome.verdict.lost_writes],
    }


def _met_by_one_fault(outcome: Outcome) -> list[Recovery]:
    """Those that no further fault fell into: what the product owes, and not the soak."""
    times = sorted(strike.since for strike in outcome.strikes)
    return [
        recovery
        for recovery in outcome.recoveries
        if bisect_right(times, recovery.at + recovery.seconds) - bisect_right(times, recovery.at) == 0
    ]


def _recoveries(recoveries: Sequence[Recovery]) -> dict[str, dict[str, float]]:
    by_kind: dict[str, list[float]] = defaultdict(list)
    for recovery in recoveries:
        by_kind[recovery.kind].append(recovery.seconds)
    return {kind: _quantiles(seconds) for kind, seconds in sorted(by_kind.items())}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    quantiles = {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99), "max": max(seconds)}
    return {"jobs": len(seconds), **{name: round(value, 2) for name, value in quantiles.items()}}


def _slowest(outcome: Outcome) -> list[dict[str, Any]]:
    """The recoveries that took longest, each with the time of its fault."""
    offset = outcome.strikes[0].at - outcome.strikes[0].since if outcome.strikes else 0.0
    slowest = sorted(outcome.recoveries, key=lambda recovery: -recovery.seconds)[:_SHOWN_SLOW]
    return [
        {"kind": one.kind, "at": round(one.at + offset, 2), "seconds": round(one.seconds, 2), "job": one.job}
        for one in slowest
    ]


def _finding(finding: Finding, outcome: Outcome) -> dict[str, Any]:
    job = outcome.jobs.get(finding.job)
    log_end = [f"{entry_id} {entry.kind}" for entry_id, entry in job.log[-_LOG_END:]] if job is not None else []
    prompt = job.prompt if job is not None else ""
    return {**asdict(finding), "prompt": prompt, "log_end": log_end}


def print_report(outcome: Outcome, json_file: Path | None, write: Callable[[str], None] = print) -> None:
    """Show the tables, and write the JSON file where one is wanted."""
    report = as_json(outcome)
    titles = ["FAULT", "TIMES", "JOBS MET", "RECOVERY P50 s", "P99 s", "MET BY IT ALONE", "P50 s", "P99 s"]
    write(table(titles, _rows_of_faults(report)))
    write("")
    resumes = ", ".join(f"{times} {who}" for who, times in report["resumes"].items())
    statuses = ", ".join(f"{number} {status}" for status, number in report["jobs_by_status"].items())
    killed = ", ".join(f"{number} {role}" for role, number in report["processes_killed"].items())
    rows = [
        ["jobs", f"{report['jobs']} ({statuses}), of {report['requests']} requests; {report['tokens']} tokens"],
        ["kills", f"{report['kills']}: {killed}"],
        ["resumes", resumes],
        *([kind, str(report[kind])] for kind in FAULT_KINDS),
        ["lost writes", f"{report['lost_writes']} (apart: acknowledged, and not on disk when Redis was killed)"],
        ["death bound", f"{len(report['death_bound'])} (apart: innocent jobs that died too often with what we killed)"],
        ["settled after", f"{report['settled_s']} s"],
    ]
    write(table(["WHAT", "FOUND"], rows))
    for finding in report["findings"][:_SHOWN_FINDINGS]:
        write(f"{finding['kind']}: {finding['job'] or '-'}: {finding['what']}; log ends {finding['log_end']}")
    if len(report["findings"]) > _SHOWN_FINDINGS:
        write(f"… and {len(report['findings']) - _SHOWN_FINDINGS} more; --json has them all")
    write(f"{'holds' if outcome.verdict.holds else 'BROKEN'}, seed {outcome.options['seed']}")
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def _rows_of_faults(report: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for kind in [*report["faults"], *(kind for kind in report["recovery_s"] if kind not in report["faults"])]:
        numbers = [
            str(report[name][kind][figure]) if kind in report[name] else ""
            for name in ("recovery_s", "recovery_alone_s")
            for figure in ("jobs", "p50", "p99")
        ]
        rows.append([kind, str(report["faults"].get(kind, "")), *numbers])
    return rows
