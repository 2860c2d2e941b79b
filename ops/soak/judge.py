"""The verdict: compares what clients saw and what the ledger holds with the right answers. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ops.soak.observations import ENDED, FaultKind, LedgerJob, Leftovers, Sighting, Strike
from ops.soak.plans import Part, plan_and_part_of

_ENTRY_ID: Final = re.compile(r"(\d+)-(\d+)")
#: Under everysec, Redis may hold writes back for so long while the disk is slow.
_SLOWEST_FSYNC_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `job` is its id, "" where it is none of a job."""

    kind: FaultKind
    job: str
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, and what is apart: neither right nor wrong.

    Attributes:
        lost_writes: findings about jobs whose writes a killed Redis had acknowledged before they were on disk. Under
            `appendfsync always` there can be none, so they are findings there.
        death_bound: jobs that ended because processes that we killed had died with them too often.
    """

    findings: tuple[Finding, ...]
    lost_writes: tuple[Finding, ...] = ()
    death_bound: tuple[str, ...] = ()

    def count(self, kind: FaultKind) -> int:
        return sum(finding.kind == kind for finding in self.findings)

    @property
    def holds(self) -> bool:
        return not self.findings


def judge(
    sightings: Sequence[Sighting],
    jobs: Mapping[str, LedgerJob],
    leftovers: Leftovers,
    *,
    strikes: Sequence[Strike] = (),
    may_lose_writes: bool = False,
) -> Verdict:
    """Compare.

    Args:
        jobs: every record that the ledger holds, by id.
        strikes: the faults that were injected.
        may_lose_writes: Redis runs without `appendfsync always`.
    """
    by_part: dict[tuple[int, int], list[LedgerJob]] = defaultdict(list)
    for job in jobs.values():
        of = plan_and_part_of(job.prompt)
        if of is not None:
            by_part[of].append(job)
    findings: list[Finding] = []
    lost_writes: list[Finding] = []
    death_bound: list[str] = []
    redis_kills = [strike.at for strike in strikes if strike.kind in ("redis", "all")]
    for sighting in sightings:
        plan = sighting.plan
        mine = [by_part.get((plan.number, i), []) for i in range(len(plan.parts))]
        found = [*_existence(sighting, mine), *_of_client(sighting, mine)]
        for part, records in zip(plan.parts, mine, strict=True):
            for job in records:
                if _ended_by_death_bound(part, job):
                    death_bound.append(job.id)
                found.extend(_of_record(sighting, part, job))
        (lost_writes if may_lose_writes and _met_by(sighting, redis_kills) else findings).extend(found)
    findings.extend(_of_leftovers(leftovers))
    return Verdict(tuple(findings), tuple(lost_writes), tuple(death_bound))


def _met_by(sighting: Sighting, kills: Iterable[float]) -> bool:
    """Whether Redis was killed between the acceptance of the job and its end, give or take its slowest fsync."""
    if sighting.accepted_at is None:
        return False
    until = (sighting.ended_at or float("inf")) + _SLOWEST_FSYNC_S
    return any(sighting.accepted_at <= at <= until for at in kills)


def _existence(sighting: Sighting, mine: Sequence[Sequence[LedgerJob]]) -> Iterator[Finding]:
    """Accepted means recorded, and recorded once."""
    plan = sighting.plan
    if len(sighting.ids) > 1:
        yield Finding("doubled", sighting.ids[0], f"request {plan.number} was answered with jobs {sighting.ids}")
    for i, records in enumerate(mine):
        named = sighting.ids[0] if sighting.ids else ""
        wanted = f"{named}.{i}" if plan.way == "generate" else named
        if len(records) > 1:
            yield Finding("doubled", records[0].id, f"request {plan.number} made jobs {[job.id for job in records]}")
        if sighting.accepted_at is not None and wanted not in [job.id for job in records]:
            yield Finding("lost", wanted, f"request {plan.number} was accepted as {wanted}, which has no record")


def _of_record(sighting: Sighting, part: Part, job: LedgerJob) -> Iterator[Finding]:
    yield from _of_log(job)
    if job.status not in ENDED:
        yield Finding("stuck", job.id, f"it is {job.status} at token {job.k}, and nothing happens")
        return
    yield from _of_end(sighting, part, job)


def _of_log(job: LedgerJob) -> Iterator[Finding]:
    """Each token once and in order, one end and it is last, ids that rise, epochs that never fall."""
    have, last_epoch = 0, 0
    ends = 0
    for entry_id, entry in job.log:
        if ends:
            yield Finding("doubled", job.id, f"entry {entry_id} ({entry.kind}) follows the end")
        epoch, n = _epoch_and_n(entry_id)
        if n != entry.n:
            yield Finding("gapped", job.id, f"entry {entry_id} says that the log holds {entry.n} tokens")
        if entry.kind == "tokens":
            if entry.first > have + 1:
                yield Finding("gapped", job.id, f"entry {entry_id} starts at token {entry.first}, after {have}")
            elif entry.first <= have:
                yield Finding("doubled", job.id, f"entry {entry_id} has token {entry.first} again, after {have}")
        elif entry.n != have:
            yield Finding("gapped", job.id, f"entry {entry_id} ({entry.kind}) is at token {entry.n}, after {have}")
        if epoch < last_epoch:
            yield Finding("gapped", job.id, f"entry {entry_id} is of an epoch before {last_epoch}")
        have, last_epoch = max(have, entry.n), epoch
        ends += entry.kind == "end"
    if job.status in ENDED and not ends:
        yield Finding("gapped", job.id, f"it has {job.status}, and its log has no end: it stops at token {have}")
    folded = "".join("".join(entry.text) for _, entry in job.log)
    if folded != job.text:
        yield Finding("gapped", job.id, f"its text {_shown(job.text)} is not that of its log, {_shown(folded)}")


def _epoch_and_n(entry_id: str) -> tuple[int, int]:
    found = _ENTRY_ID.fullmatch(entry_id)
    if found is None:
        raise ValueError(f"{entry_id!r} is no entry id")
    return int(found[1]), int(found[2])


def _of_end(sighting: Sighting, part: Part, job: LedgerJob) -> Iterator[Finding]:
    plan = sighting.plan
    whole = part.text()
    if not whole.startswith(job.text):
        yield Finding("wrong", job.id, f"its text {_shown(job.text)} is not what the engine says, {_shown(whole)}")
    if job.status == "succeeded":
        if part.marker in ("raise", "exit", "hang"):
            yield Finding("wrong", job.id, f"it has succeeded past its {part.marker} at token {part.marked_at}")
        elif job.text != whole:
            yield Finding("wrong", job.id, f"it has succeeded with {_shown(job.text)} of {_shown(whole)}")
    elif job.status == "failed":
        yield from _of_failure(part, job)
    elif job.status == "cancelled" and not (sighting.asked_to_cancel or sighting.left):
        yield Finding("wrong", job.id, "it is cancelled, and nobody asked for that")
    elif job.status == "expired" and plan.deadline_s is None:
        yield Finding("wrong", job.id, "it has expired, and its deadline is a day away")


def _of_failure(part: Part, job: LedgerJob) -> Iterator[Finding]:
    if part.marker == "raise" and job.error_code == "engine_error":
        if job.text != part.text(part.marked_at - 1):
            yield Finding("wrong", job.id, f"it failed with {_shown(job.text)}, not before token {part.marked_at}")
    elif part.kills and job.error_code == "worker_died":
        if len(job.text) > len(part.text(part.marked_at - 1)):
            yield Finding("wrong", job.id, f"its text goes on behind its {part.marker} at token {part.marked_at}")
    elif not _ended_by_death_bound(part, job):
        yield Finding("wrong", job.id, f"it failed with {job.error_code}: {job.error_message}")


def _ended_by_death_bound(part: Part, job: LedgerJob) -> bool:
    """Whether an innocent job failed of deaths among which are some that we caused from outside."""
    from_outside = "SIGKILL" in job.error_message or "lost touch" in job.error_message
    return job.status == "failed" and job.error_code == "worker_died" and not part.kills and from_outside


def _of_client(sighting: Sighting, mine: Sequence[Sequence[LedgerJob]]) -> Iterator[Finding]:
    """What the client has is what the ledger has."""
    plan, id = sighting.plan, sighting.ids[0] if sighting.ids else ""
    for kind, what in sighting.faults:
        yield Finding(kind, id, f"client {plan.number}: {what}")
    if sighting.gave_up:
        yield Finding("stuck", id, f"client {plan.number} had no answer: {sighting.gave_up}")
    records = [found[0] for found in mine if found]
    if sighting.texts is None or len(records) != len(plan.parts):
        return
    for got, job in zip(sighting.texts, records, strict=True):
        if sighting.status and got != job.text and job.status in ENDED:
            as_kind: FaultKind = "gapped" if job.text.startswith(got) else "wrong"
            yield Finding(as_kind, job.id, f"client {plan.number} has {_shown(got)}, the ledger {_shown(job.text)}")
    if len(records) == 1 and sighting.status and sighting.status != records[0].status:
        yield Finding(
            "doubled", records[0].id, f"client {plan.number} was told {sighting.status}, it is {records[0].status}"
        )


def _of_leftovers(left: Leftovers) -> Iterator[Finding]:
    if left.slots_taken:
        yield Finding("left", "", f"{left.slots_taken} slots are taken, and nothing rides")
    for what, names in (
        ("keys without a time to live", left.keys_without_ttl),
        ("entries in the queues", left.waiting),
        ("processes", left.processes),
    ):
        if names:
            shown = ", ".join(names[:5])
            yield Finding("left", "", f"{len(names)} {what}: {shown}{'…' if len(names) > 5 else ''}")
    if left.messages:
        yield Finding("left", "", f"{left.messages} messages in the broker")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:18]!r}…{text[-18:]!r} ({len(text)} characters)"
