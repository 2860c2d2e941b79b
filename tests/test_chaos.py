"""The soak: its judge sees every kind of fault, its plans can be computed, and a short run of it finds nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ops.soak.faults import WEIGHTS
from ops.soak.judge import Verdict, judge
from ops.soak.observations import FAULT_KINDS, FaultKind, LedgerJob, Leftovers, Sighting, Strike
from ops.soak.plans import Part, Plan, draw_plan, plan_and_part_of
from tasks.entries import Entry
from tests.instance import until
from worker.simulation import completion, completion_ids, token_text

ROOT = Path(__file__).parent.parent
TOKENS = 4


# --- what the judge sees ---------------------------------------------------------------------------------------------


def part_of(marker: str = "", at: int = 1, tokens: int = TOKENS) -> Part:
    written = {"": "", "exit": f" [[exit 137]]@{at}"}.get(marker, f" [[{marker}]]@{at}")
    return Part(f"soak 0 part 0 words{written}", 7, tokens, marker, at)  # type: ignore[arg-type]


def log_of(part: Part, tokens: int, status: str = "succeeded") -> list[tuple[str, Entry]]:
    """A log as the ledger writes it: a marker, a token an entry, the end in an epoch of its own."""
    ids = completion_ids(part.prompt, part.seed, part.max_tokens)[:tokens]
    entries = [(f"1-{n}", Entry("tokens", n, (id,), (token_text(id),))) for n, id in enumerate(ids, 1)]
    return [("1-0", Entry("marker", 0)), *entries, (f"2-{len(ids)}", Entry("end", len(ids), text=("",), status=status))]


def job_of(part: Part, log: list[tuple[str, Entry]], status: str = "succeeded", **fields: str) -> LedgerJob:
    text = "".join("".join(entry.text) for _, entry in log)
    return LedgerJob("a", part.prompt, part.seed, status, log[-1][1].n, text, log=tuple(log), **fields)  # type: ignore[arg-type]


def sighting_of(part: Part, **fields: object) -> Sighting:
    plan = Plan(0, "stream", (part,), 7, "key")
    given = {"accepted_at": 1.0, "ids": ["a"], "texts": [part.text()], "status": "succeeded", **fields}
    return Sighting(plan, **given)  # type: ignore[arg-type]


def verdict_on(sighting: Sighting, *jobs: LedgerJob, left: Leftovers | None = None) -> Verdict:
    return judge([sighting], {job.id: job for job in jobs}, left or Leftovers())


def kinds(verdict: Verdict) -> set[FaultKind]:
    return {finding.kind for finding in verdict.findings}


def test_a_right_job_holds() -> None:
    part = part_of()
    verdict = verdict_on(sighting_of(part), job_of(part, log_of(part, TOKENS)))
    assert verdict.holds, verdict.findings


def test_an_accepted_job_without_a_record_is_lost() -> None:
    assert kinds(verdict_on(sighting_of(part_of()))) == {"lost"}


def test_a_job_that_nobody_was_told_of_need_not_be_there() -> None:
    assert verdict_on(sighting_of(part_of(), accepted_at=None, ids=[], texts=None, status="")).holds


def test_two_jobs_of_one_request_are_doubled() -> None:
    part = part_of()
    job = job_of(part, log_of(part, TOKENS))
    assert "doubled" in kinds(verdict_on(sighting_of(part), job, replace(job, id="b")))


def test_two_answers_with_different_jobs_are_doubled() -> None:
    part = part_of()
    found = verdict_on(sighting_of(part, ids=["a", "b"]), job_of(part, log_of(part, TOKENS)))
    assert "doubled" in kinds(found)


def test_a_token_twice_in_the_log_is_doubled() -> None:
    part = part_of()
    log = log_of(part, TOKENS)
    assert "doubled" in kinds(verdict_on(sighting_of(part), job_of(part, [*log[:3], *log[2:]])))


def test_an_entry_behind_the_end_is_doubled() -> None:
    part = part_of()
    log = log_of(part, TOKENS)
    assert "doubled" in kinds(verdict_on(sighting_of(part), job_of(part, [*log, ("3-4", Entry("marker", 4))])))
    assert "doubled" in kinds(verdict_on(sighting_of(part), job_of(part, [*log, log[-1]])))


def test_a_missing_token_in_the_log_is_gapped() -> None:
    part = part_of()
    log = log_of(part, TOKENS)
    assert "gapped" in kinds(verdict_on(sighting_of(part), job_of(part, [*log[:2], *log[3:]])))


def test_an_ended_job_whose_log_has_no_end_is_gapped() -> None:
    part = part_of()
    assert "gapped" in kinds(verdict_on(sighting_of(part), job_of(part, log_of(part, TOKENS)[:-1])))


def test_an_entry_of_an_older_owner_behind_one_of_a_newer_is_gapped() -> None:
    part = part_of()
    log = log_of(part, TOKENS)
    log[1] = ("5-1", log[1][1])
    assert "gapped" in kinds(verdict_on(sighting_of(part), job_of(part, log)))


@pytest.mark.parametrize("status", ["queued", "running"])
def test_a_job_that_does_not_end_is_stuck(status: str) -> None:
    part = part_of()
    seen = sighting_of(part, texts=None, status="")
    assert kinds(verdict_on(seen, job_of(part, log_of(part, 2)[:-1], status))) == {"stuck"}


def test_a_client_without_an_answer_is_stuck() -> None:
    part = part_of()
    seen = sighting_of(part, texts=None, status="", gave_up="GET /jobs/a: 503")
    assert kinds(verdict_on(seen, job_of(part, log_of(part, TOKENS)))) == {"stuck"}


def test_another_text_is_wrong() -> None:
    part, other = part_of(), replace(part_of(), seed=8)
    log = log_of(other, TOKENS)
    assert "wrong" in kinds(verdict_on(sighting_of(part, texts=[other.text()]), job_of(part, log)))


def test_success_with_a_part_of_the_text_is_wrong() -> None:
    part = part_of()
    log = log_of(part, 2)
    assert kinds(verdict_on(sighting_of(part, texts=[part.text(2)]), job_of(part, log))) == {"wrong"}


def test_what_a_client_put_together_is_compared_with_the_ledger() -> None:
    part = part_of()
    assert kinds(verdict_on(sighting_of(part, texts=[part.text(2)]), job_of(part, log_of(part, TOKENS)))) == {"gapped"}


def test_what_a_client_itself_saw_counts() -> None:
    part = part_of()
    seen = sighting_of(part, faults=[("gapped", "event 3 follows token 1"), ("doubled", "event 2 follows token 2")])
    assert kinds(verdict_on(seen, job_of(part, log_of(part, TOKENS)))) == {"gapped", "doubled"}


def test_two_different_endings_are_doubled() -> None:
    part = part_of()
    assert "doubled" in kinds(verdict_on(sighting_of(part, status="cancelled"), job_of(part, log_of(part, TOKENS))))


@pytest.mark.parametrize(("status", "asked"), [("cancelled", {"asked_to_cancel": True}), ("cancelled", {"left": True})])
def test_a_cancel_is_right_only_where_somebody_asked_for_it(status: str, asked: dict[str, bool]) -> None:
    part = part_of()
    job = job_of(part, log_of(part, 2, status), status)
    seen = sighting_of(part, status=status, texts=[part.text(2)])
    assert kinds(verdict_on(seen, job)) == {"wrong"}
    for name, value in asked.items():
        setattr(seen, name, value)
    assert verdict_on(seen, job).holds


def test_an_expiry_without_a_deadline_is_wrong() -> None:
    part = part_of()
    job = job_of(part, log_of(part, 2, "expired"), "expired")
    assert kinds(verdict_on(sighting_of(part, status="expired", texts=[part.text(2)]), job)) == {"wrong"}


@pytest.mark.parametrize(
    ("marker", "code"), [("raise", "engine_error"), ("exit", "worker_died"), ("hang", "worker_died")]
)
def test_a_failure_is_right_only_where_the_prompt_asks_for_it(marker: str, code: str) -> None:
    part = part_of(marker, 3)
    job = job_of(part, log_of(part, 2, "failed"), "failed", error_code=code)
    seen = sighting_of(part, status="failed", texts=[part.text(2)])
    assert verdict_on(seen, job).holds
    innocent = part_of()
    failed = job_of(innocent, log_of(innocent, 2, "failed"), "failed", error_code=code, error_message="exit code 137")
    assert kinds(verdict_on(sighting_of(innocent, status="failed", texts=[innocent.text(2)]), failed)) == {"wrong"}


def test_success_of_a_poison_prompt_is_wrong() -> None:
    part = part_of("exit", 3)
    assert "wrong" in kinds(verdict_on(sighting_of(part), job_of(part, log_of(part, TOKENS))))


def test_an_innocent_job_that_died_with_what_we_killed_stands_apart() -> None:
    part = part_of()
    message = "at token 3: its worker died or lost touch; at token 3: exit code 137 while decoding"
    job = job_of(part, log_of(part, 2, "failed"), "failed", error_code="worker_died", error_message=message)
    verdict = verdict_on(sighting_of(part, status="failed", texts=[part.text(2)]), job)
    assert verdict.holds
    assert verdict.death_bound == ("a",)


def test_what_is_left_over_is_found() -> None:
    part = part_of()
    for left in (Leftovers(slots_taken=1), Leftovers(keys_without_ttl=("x",)), Leftovers(messages=2)):
        assert kinds(verdict_on(sighting_of(part), job_of(part, log_of(part, TOKENS)), left=left)) == {"left"}


@pytest.mark.parametrize("killed_at", [1.5, 100.0])
def test_writes_that_a_killed_redis_lost_stand_apart_only_where_it_may_lose_some(killed_at: float) -> None:
    seen, strikes = sighting_of(part_of(), ended_at=2.0), [Strike("redis", killed_at, 0.0, "redis 1")]
    always = judge([seen], {}, Leftovers(), strikes=strikes)
    everysec = judge([seen], {}, Leftovers(), strikes=strikes, may_lose_writes=True)
    assert kinds(always) == {"lost"}
    assert everysec.holds is (killed_at < 10), "a kill long after its end took nothing of it"


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_plans_again() -> None:
    first, second = ([draw_plan(random.Random(5), number) for number in range(50)] for _ in range(2))
    assert first == second


def test_a_prompt_leads_to_its_plan_and_its_text_can_be_computed() -> None:
    draw = random.Random(5)
    for number in range(200):
        plan = draw_plan(draw, number)
        for i, part in enumerate(plan.parts):
            assert plan_and_part_of(part.prompt) == (number, i)
            assert part.text() == completion(part.prompt, part.seed, part.max_tokens)
    assert plan_and_part_of("Hello, I am") is None


# --- the command -----------------------------------------------------------------------------------------------------


def soak(*options: str, folder: Path) -> list[str]:
    report = folder / "report.json"
    return [sys.executable, "-m", "ops.soak", "--json", str(report), *options]


def processes_with(tmpdir: str) -> Iterator[str]:
    """Living processes that have this TMPDIR in their environment, as all of a soak do."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == tmpdir and process.status() != psutil.STATUS_ZOMBIE:
                yield " ".join(process.cmdline())


@pytest.mark.timeout(400)
def test_a_short_soak_loses_doubles_gaps_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--minutes", "0.33", "--seed", "7", "--clients", "12", "--gap", "1.5")
    done = subprocess.run(
        soak(*options, folder=tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report[kind] for kind in (*FAULT_KINDS, "lost_writes")] == [0] * 7
    assert report["jobs"] > 20
    assert report["kills"] > 0
    assert sum(report["resumes"].values()) > 0
    assert "holds, seed 7" in done.stdout


@pytest.mark.timeout(200)
def test_ctrl_c_ends_a_soak_and_every_process_of_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        soak("--minutes", "5", folder=tmp_path), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        until(lambda: "requests" in process.stderr.readline(), "it runs", 120)  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
    assert not list(processes_with(str(tmp_path)))
    assert not list(tmp_path.glob("carpool-soak-*"))


def test_the_page_lists_every_kind_of_fault_and_of_finding() -> None:
    page = (ROOT / "docs" / "durability.md").read_text()
    for kind in WEIGHTS:
        assert f"| `{kind}` |" in page, kind
    for found in FAULT_KINDS:
        assert f"| {found} |" in page, found
