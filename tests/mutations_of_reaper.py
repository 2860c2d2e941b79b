"""Fences of reaper and pump, and what happens without each."""

from __future__ import annotations

from tests import test_ledger, test_ledger_ends, test_ledger_reaper
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Mutation, one


def a_job_whose_model_is_gone_ends(ledger: LedgerOnAClock) -> None:
    test_ledger_reaper.model_changes(ledger, handed_back=True)


def a_job_waits_while_its_model_loads(ledger: LedgerOnAClock) -> None:
    test_ledger_reaper.test_a_job_waits_while_a_worker_of_its_model_lives_or_loads(ledger, {"state": "restarting"})


REAPER = (
    Mutation(
        "reap: an outage is seen",
        "leases that ran out while Redis was away would be taken from their living owners",
        one(
            "if NOW - tick > C.tick_stale then redis.call('SET', P .. 'grace',",
            "if false then redis.call('SET', P .. 'grace',",
        ),
        (test_ledger_reaper.test_after_an_outage_the_reaper_takes_nothing_for_one_grace_and_then_goes_on,),
        walk=True,
    ),
    Mutation(
        "reap: grace",
        "the same, by the reaper itself",
        one("local in_grace = not past_grace()", "local in_grace = false"),
        (test_ledger_reaper.test_after_an_outage_the_reaper_takes_nothing_for_one_grace_and_then_goes_on,),
    ),
    Mutation(
        "reap: a stop that nobody carries out",
        "a cancelled job whose owner is dead would never end",
        one("  elseif j.stop ~= '' then\n    note_lost(key, j)\n    terminal_stop(id, j.stop)\n"),
        (test_ledger_reaper.test_a_job_that_is_to_stop_ends_when_its_lease_has_run_out,),
    ),
    Mutation(
        "reap: a deadline is told to the owner",
        "it would hear of it only with its next call",
        one(
            "    redis.call('PUBLISH', P .. C.db .. ':o:' .. redis.call('HGET', key, 'incarnation'), id)\n    end",
            "    end",
        ),
        (test_ledger_reaper.test_a_riding_job_is_told_of_its_deadline_and_may_end_itself,),
    ),
    Mutation(
        "reap: the deadline of a job without an owner",
        "it would wait for a worker that never comes",
        one(
            "  elseif NOW >= deadline then\n    note_lost(key, j)\n    terminal_stop(id, 'expired')\n"
            "  elseif not model_is_gone",
            "  elseif not model_is_gone",
        ),
        (test_ledger_reaper.test_a_job_that_lost_its_owner_expires_with_no_worker_alive,),
    ),
    Mutation(
        "reap: the death that is one too many",
        "with no worker up a poison job would stay `running` until one comes",
        one("if not (j.boarded ~= '' and last and charge(id, 'its worker died or lost touch')) then", "if true then"),
        (test_ledger.test_taking_over_a_boarded_job_counts_as_a_death_and_three_at_one_place_end_it,),
    ),
    Mutation(
        "reap: every look moves due beyond now",
        "fifty jobs that stay due would hide all the others",
        one("      set_due(id, NOW + math.min(C.invitation * 2 ^ invites, C.look_again), expires)\n"),
        (test_ledger_reaper.test_invitations_of_one_job_thin_out_but_come_every_ten_seconds,),
    ),
    Mutation(
        "reap: what is over is no longer due",
        "fifty ended jobs would hide all the others",
        one("    redis.call('ZREM', DUE, id)\n  elseif j.status == 'queued'", "  elseif j.status == 'queued'"),
        (test_ledger_reaper.test_what_has_no_record_or_has_ended_is_dropped_from_due,),
    ),
    Mutation(
        "reap: invitations thin out",
        "full workers would find hundreds of messages of one job",
        one(
            "set_due(id, NOW + math.min(C.invitation * 2 ^ invites, C.look_again), expires)",
            "set_due(id, NOW + C.invitation, expires)",
        ),
        (test_ledger_reaper.test_invitations_of_one_job_thin_out_but_come_every_ten_seconds,),
    ),
    Mutation(
        "reap: but not without bound",
        "a job would wait for half a minute beside a free slot",
        one("math.min(C.invitation * 2 ^ invites, C.look_again)", "C.invitation * 2 ^ invites"),
        (test_ledger_reaper.test_invitations_of_one_job_thin_out_but_come_every_ten_seconds,),
    ),
    Mutation(
        "reap: a model that is gone",
        "a job with tokens would wait for a model that nobody loads any more",
        one(
            "  if NOW - tonumber(j.unserved_since) < C.model_gone then return false end",
            "  if true then return false end",
        ),
        (a_job_whose_model_is_gone_ends,),
    ),
    Mutation(
        "reap: a model that may come back",
        "a job would fail while a worker of its model loads",
        one("or workers.loading or workers.served[j.fingerprint] then", "then"),
        (a_job_waits_while_its_model_loads,),
    ),
    Mutation(
        "reap: the minute starts anew after an outage",
        "no heartbeat was seen while Redis was away: every model looked gone",
        one("    model_is_gone(id, key, j) -- the outage does not count\n"),
        (test_ledger_reaper.test_the_minute_without_the_model_starts_anew_when_it_is_served_or_redis_was_away,),
    ),
    Mutation(
        "due: a queued job with tokens is looked at",
        "its due time was its deadline: a day",
        one("return k == '0' and deadline or math.min(deadline, NOW + C.look_again)", "return deadline"),
        (a_job_whose_model_is_gone_ends,),
    ),
    Mutation(
        "pump: young marks",
        "every pump would send the same invitations again",
        one("if not mark or tonumber(mark) < young then", "if true then"),
        (test_ledger_reaper.test_a_slot_that_comes_free_invites_the_next_one,),
    ),
    Mutation(
        "pump: old marks count as lost",
        "a message that the broker lost would be waited for until the deadline",
        one("if not mark or tonumber(mark) < young then", "if not mark then"),
        (test_ledger_reaper.test_an_invitation_that_nobody_took_counts_as_lost_after_three_seconds,),
    ),
    Mutation(
        "pump: few messages in the broker",
        "messages fix their order: priorities and places in the queue would mean nothing",
        one("local room = crew.free + 2 - pending", "local room = 1000"),
        (test_ledger_reaper.test_as_many_are_invited_as_slots_are_free_and_two_more_in_order,),
    ),
    Mutation(
        "pump: what lies in the broker",
        "full workers would have the same jobs invited again every three seconds",
        one(
            "math.max(redis.call('ZCOUNT', inv, int(young), '+inf'), redis.call('LLEN', queue_key(pool)))",
            "redis.call('ZCOUNT', inv, int(young), '+inf')",
        ),
        (test_ledger_reaper.test_messages_that_lie_in_the_broker_count_as_invitations,),
    ),
    Mutation(
        "pump: a ready worker",
        "invitations would pile up in front of nobody",
        one("if not crew.ready then return {} end"),
        (test_ledger_reaper.test_nobody_is_invited_while_no_worker_of_the_pool_is_ready,),
    ),
    Mutation(
        "pump: another model's jobs are passed over",
        "a job that only another worker may go on with would block the queue",
        one("elseif crew.free == 0 or j.fingerprint == '' or j.k == '0' or crew.prints[j.fingerprint] then", "else"),
        (test_ledger_reaper.test_a_job_is_passed_over_where_no_free_slot_serves_its_model,),
    ),
    Mutation(
        "pump: only what is queued",
        "a job that is gone would be invited for ever",
        (
            (
                "if j.status ~= 'queued' then\n        leave_queues(id, pool)",
                "if false then\n        leave_queues(id, pool)",
            ),
            ("  if not crew.ready then return {} end\n  Q.check(pool)\n", "  if not crew.ready then return {} end\n"),
        ),
        (test_ledger_reaper.test_a_job_that_is_claimed_or_ended_is_not_invited,),
    ),
    Mutation(
        "forget: a live job",
        "an accepted job could be lost by a request",
        one("elseif j.status == 'queued' or j.status == 'running' then\n  return 'riding'\n"),
        (test_ledger_ends.test_an_ended_job_can_be_forgotten_and_a_live_one_not,),
    ),
)
