"""The benches work: each one runs, quickly and on the simulated engine, and gives the figures that it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.bench.load import jobs_per_s
from ops.bench.report import Figure, at_least, at_most, percentile, print_report, ratio_of

#: By bench, what has to be there, with its target where it has one.
FIGURES: dict[str, dict[str, str | None]] = {
    "path": {"path / engine alone": ">= 0.9"},
    "source_design": {
        "10 streams at 4 slots: Carpool / source design": ">= 2.4",
        "10 streams at 10 slots: Carpool / source design": ">= 4",
        "basic_generate at 10 clients: Carpool / source design": ">= 4",
        "basic_generate: Carpool at 4 clients / at 1": "> 1",
    },
    "latency": {
        "first token": "<= 15",
        "first token / floor": "<= 2",
        "refill of a freed slot": "<= 20",
    },
    "polling": {
        "p95 of 100 clients that ask once a second: riding / idle": "<= 2",
        "p95 of 100 clients that ask at once again: riding / idle": "<= 2",
    },
    "eta": {"median error of the ETA at submission": "<= 0.3"},
    "load": {
        "jobs/s at 2 times the rate / at saturation": ">= 0.95",
        "jobs/s at 10 times the rate / at saturation": ">= 0.95",
        "answers other than 202 and an honest 503 at 10 times the rate": "<= 0",
        "accepted jobs that did not end well at 10 times the rate": "<= 0",
    },
    "idle": {
        "95 % of submissions, 50 polls and streams open": "<= 50",
        "memory of the API for each of them": "<= 100",
    },
    "memory": {
        "worker's parent process, the most over 60 jobs": "<= 250",
        "API, the most over 60 jobs": "<= 150",
    },
    "scale": {
        "jobs: least of linear, where a fifth of the processor is idle": ">= 0.95",
        "streams: least of linear, where a fifth of the processor is idle": ">= 0.95",
    },
    "redis_wall": {"4 slots, entries of 1 token: GPUs at 20 ms a step": ">= 100"},
    "relay_wall": {"most that one API process relayed": None},
}


def test_a_job_that_rode_only_partly_within_the_time_counts_as_that_part() -> None:
    before, within, across, after = (0.0, 1.0), (2.0, 3.0), (3.5, 4.5), (4.0, 5.0)
    assert jobs_per_s([before, within, across, after], 2.0, 4.0) == pytest.approx(1.5 / 2)
    # four slots in step: whatever the moments at which the time begins and ends
    rides = [(0.4 * i, 0.4 * (i + 1)) for i in range(100) for _ in range(4)]
    for start in (10.0, 10.1, 10.39):
        assert jobs_per_s(rides, start, start + 15) == pytest.approx(10)


def started_below(folder: Path) -> list[list[str]]:
    """Command lines of the processes whose temporary folder this is: of a bench, and of all that it started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("bench", FIGURES)
def test_a_bench_gives_its_figures_and_leaves_nothing_behind(bench: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"ops.bench.{bench}", "--quick", "--json", str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "CARPOOL_LEASE_S": "no number: a developer's settings do not count",
        },
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["bench"] == bench
    assert report["quick"] is True
    assert report["setup"]["engine"] == "simulated"
    assert report["machine"]["cores"] >= 1
    targets = {figure["name"]: figure["target"] for figure in report["figures"]}
    assert {name: target for name, target in targets.items() if name in FIGURES[bench]} == FIGURES[bench]
    for figure in report["figures"]:
        assert figure["name"] in done.stdout
        assert figure["holds"] is None, "a quick run judges nothing"
        assert isinstance(figure["value"], float)
    assert list(tmp_path.glob("carpool-bench-*")) == []
    assert started_below(tmp_path) == []


def test_a_bench_names_what_it_cannot_measure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.bench.path", "--model", str(tmp_path / "no-model.gguf")],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    assert "no-model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_target_is_held_from_its_own_side() -> None:
    assert Figure("speed", 0.9, "x", at_least(0.9)).holds
    assert not Figure("speed", 0.89, "x", at_least(0.9)).holds
    assert Figure("time", 15, "ms", at_most(15)).holds
    assert not Figure("time", 15.1, "ms", at_most(15)).holds
    assert Figure("time", 15, "ms").holds is None


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_the_medians() -> None:
    assert ratio_of("ours / theirs", ours=[1, 20, 30], theirs=[1, 10, 300]).value == 1


def test_a_percentile_is_one_of_the_samples() -> None:
    assert percentile([5, 1, 4, 2, 3], 95) == 5
    assert percentile([5, 1, 4, 2, 3], 40) == 2
    assert percentile([7], 1) == 7


def test_the_table_says_which_target_was_missed(tmp_path: Path) -> None:
    lines: list[str] = []
    figures = [Figure("fast enough", 1.0, "x", at_least(0.9)), Figure("too slow", 16.0, "ms", at_most(15))]
    print_report("some", figures, {}, quick=False, load_at_start=0.5, json_file=tmp_path / "f", write=lines.append)
    table = lines[0].splitlines()
    assert table[1].split() == ["fast", "enough", "1", "x", ">=", "0.9", "yes"]
    assert table[2].split() == ["too", "slow", "16", "ms", "<=", "15", "NO"]
    assert [figure["holds"] for figure in json.loads((tmp_path / "f").read_text())["figures"]] == [True, False]
