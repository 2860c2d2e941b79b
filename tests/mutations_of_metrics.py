"""Fences of what metrics count, and what happens without each."""

from __future__ import annotations

from tests import test_ledger_metrics
from tests.mutation import Mutation, one

METRICS = (
    Mutation(
        "metrics: what was summed up is gone",
        "each look would count every job anew",
        one("redis.call('LTRIM', SEEN, #lines, -1)\n"),
        (test_ledger_metrics.counted_once,),
    ),
    Mutation(
        "metrics: a first token is the first",
        "every step would count as the beginning of a job",
        one("    if k == 0 then\n      local f", "    if true then\n      local f"),
        (test_ledger_metrics.counted_once,),
        walk=True,
    ),
    Mutation(
        "metrics: a first ride is the first",
        "the time that a job rode before its worker died would count as waiting",
        one("if j.started_at == '' then\n", "if true then\n"),
        (test_ledger_metrics.counted_once,),
    ),
    Mutation(
        "metrics: who rides has a lease",
        "the jobs of a dead worker would look as if they rode",
        one("    if overdue <= 0 then\n", "    if true then\n"),
        (test_ledger_metrics.running_by_lease,),
        walk=True,
    ),
    Mutation(
        "metrics: a report counts once",
        "a worker whose answer was lost would have its steps counted twice",
        one("if R.number <= tonumber(w.reported == '' and 0 or w.reported) then return 1 end\n"),
        (test_ledger_metrics.reported_once,),
    ),
)
