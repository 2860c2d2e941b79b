"""Fences of what may wait and whose turn it is, and what happens without each."""

from __future__ import annotations

from tasks.settings import Settings
from tests import test_ledger_admission, test_ledger_shares
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Claim, Mutation, one

#: The first thing that accept looks at.
KNOWN = "if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id, '' } end"


def capped(claim: Claim, most: int) -> Claim:
    """The claim, on a ledger where so many jobs may wait."""

    def on_capped(ledger: LedgerOnAClock) -> None:
        claim(LedgerOnAClock(ledger.client, Settings(max_queued_jobs=most), ledger.changed))

    on_capped.__name__ = getattr(claim, "__name__", "")
    return on_capped


ADMISSION = (
    Mutation(
        "admission: the cap",
        "a burst would fill Redis, and most of it would miss its deadline",
        one("if most > 0 and too_much > 0 then", "if false then"),
        (capped(test_ledger_admission.over_the_cap, 3), test_ledger_admission.owners_have_caps_of_their_own),
    ),
    Mutation(
        "admission: what is known comes first",
        "a client that never got its answer would be told that its accepted job was refused",
        (
            (f"{KNOWN}\n", ""),
            ("if refused and R.native", f"if not refused then {KNOWN} end\nif refused and R.native"),
        ),
        (capped(test_ledger_admission.a_known_request_is_not_refused, 3),),
    ),
    Mutation(
        "admission: what leaves is counted",
        "the queue would be full for ever after its first thousands of jobs",
        one("  count(pool, w, -1)\n"),
        (capped(test_ledger_admission.each_way_out_makes_room, 5),),
        walk=True,
    ),
    Mutation(
        "admission: a hand-back is counted",
        "a drain would let in as many again as it hands back",
        one(
            "Q.join(id, j.pool, j.weight ~= '' and j.weight or Q.weight_of_record(id), j.order,",
            "redis.call('ZADD', wait_key(j.pool), j.order, id) keep_until(wait_key(j.pool),",
        ),
        (capped(test_ledger_admission.a_hand_back_counts, 2),),
        walk=True,
    ),
    Mutation(
        "admission: who lost its worker waits again",
        "a worker that dies would let in as many again as it rode",
        one("      Q.lose(id, j.pool, NOW + C.look_again + 2000)\n"),
        (capped(test_ledger_admission.a_lost_worker_counts, 2),),
    ),
    Mutation(
        "admission: an owner that lives after all",
        "its jobs would count as waiting while they ride",
        one("  if tonumber(j.lease) < NOW then redis.call('ZREM', lost_key(j.pool), id) end\n"),
        (capped(test_ledger_admission.a_lost_worker_counts, 2),),
    ),
    Mutation(
        "admission: lines of batches do not count",
        "a batch would fill the queue, and people would be sent away",
        one("R.default_tokens ~= '', R.batch == '', R.key)", "R.default_tokens ~= '', true, R.key)"),
        (capped(test_ledger_admission.lines_wait_outside_the_cap, 4),),
    ),
    Mutation(
        "admission: the feeder keeps to what is free",
        "fifty thousand lines would be in Redis, beside a queue that is full",
        one("  if over and w.all_jobs > 0 then return 'full' end\n"),
        (capped(test_ledger_admission.lines_wait_outside_the_cap, 4),),
    ),
    Mutation(
        "admission: all pools together",
        "each model would have a queue of its own, and the cap would be as many times what it says",
        one(
            "  redis.call('ZADD', POOLS, 'GT', int(expires), pool)\n",
            "  redis.call('SET', POOLS .. 'x', '1', 'PX', 1000)\n",
        ),
        (capped(test_ledger_admission.all_pools_count_together, 2),),
    ),
    Mutation(
        "admission: owners cannot be mistaken for each other",
        "an owner named a:b would stand in the queue of the owner a",
        one(
            "return P .. 'own:' .. int(#owner) .. ':' .. owner .. ':' .. pool end",
            "return P .. 'own:' .. string.sub(owner, 1, 1) end",
        ),
        (test_ledger_admission.owners_have_caps_of_their_own,),
    ),
    Mutation(
        "admission: what was not counted is made up for",
        "after an upgrade the queue would seem fuller, or emptier, than it is, for as long as anything waits",
        one("  Q.recount(pool)\nend\n", "end\n"),
        (capped(test_ledger_admission.made_up_for, 3),),
    ),
)

SHARES = (
    Mutation(
        "shares: an owner pays for what is invited",
        "who came first would have all slots until its queue is empty",
        one("  redis.call('ZADD', shares_key(pool), 'XX', 'INCR', int(price), owner)\n"),
        (test_ledger_shares.one_job_is_next_again, test_ledger_shares.paid_once),
    ),
    Mutation(
        "shares: by what was really used",
        "whose jobs are long would get more than its share, a job for a job",
        one(
            "    redis.call('ZINCRBY', shares_key(pool), int(more), owner)\n",
            "    redis.call('ZINCRBY', shares_key(pool), '0', owner)\n",
        ),
        (test_ledger_shares.given_back,),
    ),
    Mutation(
        "shares: what is expected of a job is what its owner's used",
        "jobs of all lengths would cost the same until they have ended",
        one("if j.k ~= '0' then mean = mean == 0 and used or mean + (used - mean) / 8 end", "mean = 0"),
        (test_ledger_shares.each_owner_has_its_own_mean,),
    ),
    Mutation(
        "shares: who owes nothing is next",
        "who was given back what it had paid too much would go before a job that has waited for longer",
        one("    if is_free then redis.call('HSET', use_key(pool), 's:' .. owner, FRESH) end\n"),
        (test_ledger_shares.one_job_is_next_whatever_was_used,),
    ),
    Mutation(
        "shares: what nobody waited for is owed to nobody",
        "whoever has used an idle service would wait until others have used as much",
        one("if redis.call('EXISTS', shares_key(pool)) == 0 and time > pool_time(pool) then", "if false then"),
        (test_ledger_shares.nothing_is_owed_to_nobody,),
    ),
    Mutation(
        "shares: a pause is no credit",
        "an owner that was away for a day would have the slots to itself until it has caught up",
        one("and known.time > now then return known.time, false end", "then return known.time, true end"),
        (test_ledger_shares.a_pause_is_no_credit,),
    ),
    Mutation(
        "shares: what was used a moment ago counts",
        "an owner that sends one job after the other would always be next",
        one("if known and NOW - known.at <= C.share_memory", "if false"),
        (test_ledger_shares.a_loop_is_held_to_its_share,),
    ),
    Mutation(
        "shares: paid once",
        "a broker that loses messages would have an owner pay for each of them",
        one("  if charged ~= '' then return end\n  local owner = weight", "  local owner = weight"),
        (test_ledger_shares.paid_once,),
    ),
    Mutation(
        "shares: a hand-back is paid back",
        "a job that is handed back would be paid for twice",
        one("Q.refund(j.pool, id, j.weight, j.charged)\n"),
        (test_ledger_shares.paid_once,),
    ),
    Mutation(
        "shares: positions follow the turns",
        "a job would be told that it is the thousandth and be the next",
        one("if #all.lanes == 0 or (#all.lanes == 1 and mine) then", "if true then"),
        (test_ledger_shares.positions_are_true, test_ledger_shares.one_job_is_next),
    ),
)
