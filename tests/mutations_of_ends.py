"""Fences of ends, groups, cancels, hand-backs and deaths, and what happens without each."""

from __future__ import annotations

from tests import test_ledger, test_ledger_ends, test_ledger_groups, test_ledger_keys, test_ledger_steps
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import OWNED, Mutation, one

#: Who is charged with a death of the Model worker.
CHARGED = "local charged = j.young or (not some_young and j.boarded ~= '')"


def a_group_ends_with_its_last_child(ledger: LedgerOnAClock) -> None:
    test_ledger_groups.group_ends_as(ledger, ("failed", "cancelled", "expired"), "failed")


ENDS = (
    Mutation(
        "terminal: only a live job ends",
        "each death, cancel or expiry that comes late would end the job once more; the scripts that call it look "
        "themselves, so that three fences fall together",
        (
            ("if j.status ~= 'queued' and j.status ~= 'running' then return false end\n  local reason", "local reason"),
            ("  if j.status ~= 'queued' and j.status ~= 'running' then return j.status end\n", ""),
            ("if j.status ~= 'queued' then return 'no' end\n", ""),
        ),
        (test_ledger_ends.test_a_job_ends_once_whatever_comes_after,),
        walk=True,
    ),
    Mutation(
        "terminal: an epoch of its own",
        "the end would have the id of the last token",
        one("local epoch = int(tonumber(j.epoch) + 1)\n  local data", "local epoch = j.epoch\n  local data"),
        (test_ledger_ends.test_an_end_is_one_entry_and_the_last_with_tail_usage_and_reason,),
        walk=True,
    ),
    Mutation(
        "terminal: it leaves the queues",
        "an ended job would be invited",
        one("  leave_queues(id, j.pool)\n  redis.call('ZREM', DUE, id)", "  redis.call('ZREM', DUE, id)"),
        (test_ledger_ends.test_an_ended_job_is_in_no_queue_and_not_due,),
        walk=True,
    ),
    Mutation(
        "terminal: it is no longer due",
        "the reaper would look at it once more",
        one("  leave_queues(id, j.pool)\n  redis.call('ZREM', DUE, id)", "  leave_queues(id, j.pool)"),
        (test_ledger_ends.test_an_ended_job_is_in_no_queue_and_not_due,),
        walk=True,
    ),
    Mutation(
        "terminal: one expiry for all keys",
        "a log would outlive its record or go before it",
        one("  expire_job(id, at)\n  if j.native", "  if j.native"),
        (
            test_ledger_ends.test_all_keys_of_an_ended_job_share_one_expiry,
            test_ledger_keys.test_a_queued_job_that_is_ended_leaves_no_key_without_an_expiry,
        ),
        walk=True,
    ),
    Mutation(
        "terminal: an error is read before anything is written",
        "there is no rollback: the log would have an end, and Celery's record and the keys' expiry would not",
        one(
            "  local reason = reason_of(error) -- before anything is written: there is no rollback\n",
            "  local reason = setmetatable({}, { __index = function(_, name) return reason_of(error)[name] end })\n",
        ),
        (test_ledger_ends.test_an_error_that_is_no_json_changes_nothing,),
    ),
    Mutation(
        "terminal: Celery's record",
        "AsyncResult would wait for ever",
        one("  celery_end(id, status, job_view(id), reason, at)\n"),
        (test_ledger_ends.test_an_end_is_one_entry_and_the_last_with_tail_usage_and_reason,),
        walk=True,
    ),
    Mutation(
        "terminal: the tail of the text",
        "what the stop matcher held back would be missing in a poll",
        one("  if tail ~= '' then redis.call('APPEND', text_key(id), tail) end\n"),
        (test_ledger_ends.test_an_end_is_one_entry_and_the_last_with_tail_usage_and_reason,),
    ),
    Mutation(
        "group: it ends with its last child",
        "a group would end while children live",
        one("  if redis.call('HINCRBY', key, 'left', -1) > 0 then return end\n"),
        (a_group_ends_with_its_last_child,),
    ),
    Mutation(
        "group: the worst end wins",
        "a group with a failed child would look whole",
        one("if g.worst == '' or RANK[status] > RANK[g.worst] then", "if true then"),
        (a_group_ends_with_its_last_child,),
    ),
    Mutation(
        "group: its children are kept until it has ended",
        "texts of a long group would be missing when it ends",
        one("int((j.group ~= '' or j.batch ~= '') and redis.call('PEXPIRETIME', key) or NOW", "int(NOW"),
        (
            test_ledger_groups.test_the_children_of_a_group_are_kept_until_the_group_has_ended_and_then_all_share_one_expiry,
        ),
    ),
    Mutation(
        "group: its children end with it",
        "they would stay for as long as their deadline",
        one("  for i = 0, tonumber(g.n) - 1 do expire_job(group .. '.' .. int(i), at) end\n"),
        (
            test_ledger_groups.test_the_children_of_a_group_are_kept_until_the_group_has_ended_and_then_all_share_one_expiry,
        ),
    ),
    Mutation(
        "cancel: the first stop wins",
        "a status would depend on who looks last",
        one("local stop = j.stop ~= '' and j.stop or 'cancelled'", "local stop = 'cancelled'"),
        (test_ledger_ends.test_the_first_stop_wins,),
    ),
    Mutation(
        "cancel: a queued job ends at once",
        "with no worker up a cancel would never be done",
        one(
            "  if j.status == 'queued' or (tonumber(j.lease) < NOW and past_grace()) then\n    terminal_stop(id, stop)",
            "  if tonumber(j.lease) < NOW and past_grace() then\n    terminal_stop(id, stop)",
        ),
        (test_ledger_ends.test_a_queued_job_is_cancelled_at_once_with_no_worker_there,),
    ),
    Mutation(
        "cancel: grace",
        "a healthy owner would go on with a job that the status calls cancelled",
        one(
            "  if j.status == 'queued' or (tonumber(j.lease) < NOW and past_grace()) then\n    terminal_stop(id, stop)",
            "  if j.status == 'queued' or tonumber(j.lease) < NOW then\n    terminal_stop(id, stop)",
        ),
        (test_ledger_ends.test_a_cancel_of_a_job_whose_owner_is_silent_waits_for_the_end_of_grace,),
    ),
    Mutation(
        "cancel: it is kept in the record",
        "a cancel would be forgotten when its owner dies",
        one(
            "  redis.call('HSET', key, 'stop', stop)\n  set_due(id, tonumber(j.lease)",
            "  set_due(id, tonumber(j.lease)",
        ),
        (test_ledger_ends.test_a_riding_job_is_asked_to_stop_and_its_owner_hears_of_it,),
    ),
    Mutation(
        "release: a stop that is wanted",
        "a cancelled job would be queued again",
        one("if j.stop ~= '' then\n  terminal_stop(id, j.stop)\n  return j.stop\nend"),
        (test_ledger_ends.test_a_hand_back_of_a_job_that_is_to_stop_ends_it,),
    ),
    Mutation(
        "release: its place in the queue",
        "a hand-back would send the oldest job to the end",
        one("weight_of_record(id), j.order, redis", "weight_of_record(id), int(NOW_US), redis"),
        (test_ledger_ends.test_a_job_that_is_handed_back_keeps_its_place_and_is_not_charged,),
    ),
    Mutation(
        "release: no charge",
        "the next claim would charge a death that never was",
        one("'queued', 'owner', '', 'lease', '0', 'boarded', '')", "'queued', 'owner', '', 'lease', '0')"),
        (test_ledger_ends.test_a_job_that_is_handed_back_keeps_its_place_and_is_not_charged,),
    ),
    Mutation(
        "release: the owner is gone",
        "the old owner could not tell: with the status it is what keeps it out of a queued job",
        (
            ("'queued', 'owner', '', 'lease', '0', 'boarded', '')", "'queued', 'lease', '0', 'boarded', '')"),
            (OWNED, "j.epoch == epoch and j.owner == nonce"),
        ),
        (test_ledger_steps.test_the_old_owner_writes_nothing_after_it_handed_the_job_back,),
        walk=True,
    ),
)

DEATHS = (
    Mutation(
        "child_died: told again",
        "a lost reply would make one death two",
        one("elseif j.died_gen ~= '' and generation <= tonumber(j.died_gen) then", "elseif false then"),
        (test_ledger_ends.test_a_death_told_again_after_a_rider_boarded_anew_does_not_touch_it,),
    ),
    Mutation(
        "child_died: told again after a later death",
        "a request whose client gave up may be executed when the next process has died too",
        one("generation <= tonumber(j.died_gen)", "generation == tonumber(j.died_gen)"),
        (test_ledger_ends.test_a_death_that_is_told_after_a_later_one_does_not_count_again,),
    ),
    Mutation(
        "child_died: some young",
        "a poison job would take all its neighbours along",
        one(CHARGED, "local charged = j.boarded ~= ''"),
        (test_ledger_ends.test_the_one_that_had_just_boarded_is_charged_and_the_others_become_suspects,),
    ),
    Mutation(
        "child_died: nothing is boarded any more",
        "a second death before a rider is put back would be charged to it",
        one("  redis.call('HSET', j.key, 'boarded', '')\n"),
        (test_ledger_ends.test_the_one_that_had_just_boarded_is_charged_and_the_others_become_suspects,),
    ),
    Mutation(
        "child_died: none young",
        "a job that kills at a later token would never be charged",
        one(CHARGED, "local charged = j.young"),
        (test_ledger_ends.test_where_none_is_young_all_that_were_boarded_are_charged,),
    ),
    Mutation(
        "child_died: only what was in the child",
        "jobs that wait for their turn would be failed for another's deeds",
        one(
            CHARGED,
            "local charged = j.young or not some_young",
        ),
        (test_ledger_ends.test_riders_that_were_not_in_the_child_are_never_charged,),
    ),
    Mutation(
        "child_died: the others become suspects",
        "the next death would again have several who may have caused it",
        one("redis.call('HSET', j.key, 'strikes', '1', 'struck_at', j.k, 'causes', with_cause(j.causes, j.k, cause))"),
        (test_ledger_ends.test_the_one_that_had_just_boarded_is_charged_and_the_others_become_suspects,),
    ),
    Mutation(
        "young: near the place where it struck",
        "the child runs ahead: a job that dies at token 5 may have written 3 or 4",
        one("(tonumber(j.strikes) > 0 and k <= tonumber(j.struck_at) + C.run_ahead)", "false"),
        (test_ledger_ends.test_a_suspect_near_the_place_where_it_struck_counts_as_young,),
    ),
    Mutation(
        "young: not for ever",
        "an innocent that came further would be charged for each later death",
        one("k <= tonumber(j.struck_at) + C.run_ahead", "true"),
        (test_ledger_ends.test_a_suspect_that_has_come_further_is_no_longer_one,),
    ),
    Mutation(
        "charge: deaths at one place",
        "a poison job would go round ten times",
        one("if strikes < C.max_attempts and deaths < C.max_deaths then", "if deaths < C.max_deaths then"),
        (
            test_ledger_ends.test_the_third_death_at_one_place_ends_the_poison_job_alone,
            test_ledger.test_a_claim_that_finds_one_death_too_many_ends_the_job,
        ),
        walk=True,
    ),
    Mutation(
        "charge: deaths in all",
        "a job that kills at a random token would never end",
        one("if strikes < C.max_attempts and deaths < C.max_deaths then", "if strikes < C.max_attempts then"),
        (test_ledger.test_deaths_at_different_places_are_counted_too,),
    ),
    Mutation(
        "charge: strikes count at one place",
        "three deaths in a long text would fail a job that always came forward",
        one(
            "local strikes = (j.struck_at == j.k) and tonumber(j.strikes) + 1 or 1\n  local deaths",
            "local strikes = tonumber(j.strikes) + 1\n  local deaths",
        ),
        (test_ledger.test_deaths_at_different_places_are_counted_too,),
    ),
)
