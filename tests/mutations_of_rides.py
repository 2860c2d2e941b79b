"""Fences of accept, claim and step, and what happens without each."""

from __future__ import annotations

from tests import test_ledger, test_ledger_ends, test_ledger_keys, test_ledger_reaper, test_ledger_steps
from tests.mutation import OWNED, Mutation, one

#: Two lines of a step: tokens for another position than the ledger's, and the mark of a boarding.
AT_ANOTHER = "  if first > 0 and first ~= k + 1 then return { 'at', j.k, stop } end\n"
BOARD = "  if board ~= '' then redis.call('HSET', key, 'boarded', j.k) end\n"

ACCEPT = (
    Mutation(
        "accept: an id that is known",
        "a client or a lost reply sends an acceptance again: it would queue a job that runs or has ended anew",
        one("if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id, '' } end"),
        (
            test_ledger.test_the_same_acceptance_again_changes_nothing,
            test_ledger.test_the_same_group_again_changes_nothing,
        ),
        walk=True,
    ),
    Mutation(
        "accept: an idempotency key that is known",
        "a client's retry with a new id would make a second job",
        one("if known.id ~= '' then return", "if false then return"),
        (test_ledger.test_a_known_idempotency_key_gives_its_job_and_another_body_is_a_conflict,),
    ),
    Mutation(
        "accept: another body under the same key",
        "a client would be given the answer to another request",
        one("known.body == R.body and 'again' or 'conflict'", "'again'"),
        (test_ledger.test_a_known_idempotency_key_gives_its_job_and_another_body_is_a_conflict,),
    ),
    Mutation(
        "accept: the tombstone of a plain Celery task",
        "a message that comes again after its record's retention would be run once more",
        one("if R.native ~= '' and redis.call('EXISTS', P .. 'tomb:' .. R.id) == 1 then", "if false then"),
        (test_ledger.test_a_native_task_that_has_ended_and_gone_is_not_run_again,),
    ),
    Mutation(
        "accept: the record's expiry",
        "a job that nobody ends would stay for ever",
        one("  redis.call('PEXPIREAT', record_key(id), expires)\n"),
        (test_ledger_keys.test_no_key_of_a_job_is_without_an_expiry_at_any_point_of_its_life,),
        walk=True,
    ),
    Mutation(
        "accept: shared keys live as long as the longest job",
        "a short job's expiry would take the queue away from a long one",
        one(
            "if redis.call('PEXPIRETIME', key) < tonumber(at) then redis.call('PEXPIREAT', key, at) end",
            "redis.call('PEXPIREAT', key, at)",
        ),
        (test_ledger_keys.test_shared_keys_live_as_long_as_the_longest_job,),
    ),
    Mutation(
        "accept: shared keys get an expiry at first",
        "a key without one would be left without",
        one("then redis.call('PEXPIREAT', key, at) end", "then redis.call('PEXPIREAT', key, at, 'GT') end"),
        (test_ledger_keys.test_no_key_of_a_job_is_without_an_expiry_at_any_point_of_its_life,),
        walk=True,
    ),
    Mutation(
        "accept: due at the deadline",
        "with no worker alive nobody would look at the job again",
        one("  set_due(id, deadline, tonumber(expires))\n"),
        (test_ledger_reaper.test_a_queued_job_expires_at_its_deadline_with_no_worker_alive,),
        walk=True,
    ),
)

CLAIM = (
    Mutation(
        "claim: no record",
        "a late invitation would make a job anew that has expired, without an expiry",
        one("if j.status == '' then return { 'gone' } end", "if j.status == '' then j.status, j.v = 'queued', '1' end"),
        (test_ledger.test_a_job_that_nobody_knows_is_gone_and_gets_no_key,),
    ),
    Mutation(
        "claim: a record of a newer release",
        "an old worker would misread it during a rolling upgrade",
        one("if tonumber(j.v) > C.version then return { 'newer', j.v } end\n"),
        (test_ledger.test_a_record_of_a_newer_release_is_not_claimed,),
    ),
    Mutation(
        "claim: an ended job",
        "an invitation that comes twice would run it to a second end",
        one(
            "if j.status ~= 'queued' and j.status ~= 'running' then return { 'ended', j.status } end",
            "if j.status ~= 'queued' and j.status ~= 'running' then j.status = 'queued' end",
        ),
        (test_ledger.test_a_job_that_has_ended_is_not_claimed,),
        walk=True,
    ),
    Mutation(
        "claim: the same claim sent again",
        "after a lost reply the owner would find its own job taken, and a lease would pass before it rides",
        one("if j.status == 'running' and j.owner == R.nonce then", "if false then"),
        (test_ledger.test_the_same_claim_again_is_granted_and_changes_nothing,),
    ),
    Mutation(
        "claim: a valid lease",
        "two workers would ride one job",
        one(
            "(tonumber(j.lease) < NOW and past_grace())) then return { 'taken' } end",
            "past_grace()) then return { 'taken' } end",
        ),
        (test_ledger_steps.test_an_owner_may_renew_a_lease_that_ran_out_unclaimed,),
        walk=True,
    ),
    Mutation(
        "claim: grace",
        "after an outage of Redis every lease looks run out: riders would be taken from healthy workers",
        one(
            "(tonumber(j.lease) < NOW and past_grace())) then return { 'taken' } end",
            "tonumber(j.lease) < NOW) then return { 'taken' } end",
        ),
        (test_ledger.test_after_an_outage_nobody_s_lease_is_taken_for_one_grace,),
        walk=True,
    ),
    Mutation(
        "grace: until the reaper ticks again",
        "the first claim after an outage comes before the first look of a reaper",
        one("return NOW > grace and NOW - tick < C.tick_stale", "return NOW > grace"),
        (test_ledger.test_after_an_outage_nobody_s_lease_is_taken_for_one_grace,),
    ),
    Mutation(
        "claim: another model's tokens",
        "the text would go on with another model or tokenizer",
        one("if j.fingerprint ~= '' and j.k ~= '0' and j.fingerprint ~= R.fingerprint then", "if false then"),
        (test_ledger.test_another_model_does_not_go_on_with_tokens_that_are_there,),
    ),
    Mutation(
        "claim: a stop that is wanted",
        "a job whose owner died before it heard of the cancel would be run again",
        one("if j.stop ~= '' then\n  terminal_stop(id, j.stop)\n  return { 'ended', j.stop }\nend"),
        (test_ledger.test_a_claim_of_a_job_that_is_to_stop_ends_it,),
    ),
    Mutation(
        "claim: the deadline",
        "a slot would be spent on a job that is over",
        one(
            "if NOW >= tonumber(j.deadline) then\n  terminal_stop(id, 'expired')\n  return { 'ended', 'expired' }\nend"
        ),
        (test_ledger.test_a_claim_after_the_deadline_ends_the_job,),
    ),
    Mutation(
        "claim: taking over a boarded job counts as a death",
        "a prompt that kills whole workers would go round for ever",
        one("if j.boarded ~= '' and charge(id, 'its worker died or lost touch') then return", "if false then return"),
        (test_ledger.test_taking_over_a_boarded_job_counts_as_a_death_and_three_at_one_place_end_it,),
        walk=True,
    ),
    Mutation(
        "claim: an epoch of its own",
        "entries of two owners would have the same ids",
        one("local epoch = int(tonumber(j.epoch) + 1)\nlocal lease", "local epoch = j.epoch\nlocal lease"),
        (test_ledger.test_a_lease_that_has_run_out_goes_to_another_owner_at_the_job_s_position,),
        walk=True,
    ),
    Mutation(
        "claim: boarded is cleared, by the claim and by the charge",
        "the next owner's death before boarding would count as a strike",
        (
            ("'lease', int(lease), 'boarded', '', 'died_gen', '',", "'lease', int(lease), 'died_gen', '',"),
            ("'struck_at', j.k, 'boarded', '', 'causes', causes)", "'struck_at', j.k, 'causes', causes)"),
        ),
        (test_ledger.test_a_death_before_boarding_after_a_ride_is_no_strike,),
    ),
    Mutation(
        "claim: suspects wait for their turn to board",
        "two suspects would board at once, and the next death would have two who may have caused it",
        one("if R.board and struck.strikes == '0' then", "if R.board then"),
        (test_ledger.test_a_claim_does_not_board_a_job_that_something_died_with,),
    ),
    Mutation(
        "claim: boarding with the claim is recorded",
        "nobody would know that a dead process held the job",
        one("  redis.call('HSET', key, 'boarded', boarded)\n"),
        (test_ledger.test_a_claim_may_board_a_job_in_the_same_call_and_says_so_again,),
    ),
    Mutation(
        "claim: bounded claims",
        "a job whose workers die before it boards would never end",
        one("if claims > C.max_claims then", "if false then"),
        (test_ledger.test_deaths_before_boarding_are_no_strike_but_claims_are_bounded,),
    ),
    Mutation(
        "claim: the count of claims starts anew with a token",
        "a long job on a shaky worker would be failed though it comes forward",
        one("  if j.k == j.claim_k then claims", "  if true then claims"),
        (test_ledger.test_a_token_or_a_hand_back_starts_the_count_of_claims_anew,),
    ),
    Mutation(
        "claim: the log's expiry",
        "logs would pile up",
        one("redis.call('PEXPIREAT', log_key(id), int(redis.call('PEXPIRETIME', key)))"),
        (test_ledger_keys.test_no_key_of_a_job_is_without_an_expiry_at_any_point_of_its_life,),
        walk=True,
    ),
    Mutation(
        "claim: it leaves the queue",
        "the pump would invite a job that rides",
        one("leave_queues(id, j.pool)\npublish(id, marker)", "publish(id, marker)"),
        (test_ledger.test_a_claim_gives_one_owner_an_epoch_and_a_marker_in_the_log,),
        walk=True,
    ),
    Mutation(
        "claim: Celery's record lives as long as the job",
        "a job that rides for longer than the retention would look unknown to Celery",
        one("false,\n  redis.call('PEXPIRETIME', key))", "false,\n  NOW + C.retention)"),
        (test_ledger_ends.test_all_keys_of_an_ended_job_share_one_expiry,),
        walk=True,
    ),
)

STEP = (
    Mutation(
        "fence: the owner's nonce",
        "a paused owner that wakes up after another took over would write into its log; after a lost tail both have "
        "the same epoch, so the epoch alone does not tell them apart",
        one(OWNED, "j.status == 'running' and j.epoch == epoch"),
        (test_ledger_steps.test_an_owner_of_a_lost_history_is_told_apart_by_its_nonce_though_its_epoch_is_the_same,),
    ),
    Mutation(
        "fence: status and epoch together",
        "an end raises the epoch and leaves the nonce: either of the two keeps the last owner out, none does not",
        one(OWNED, "j.owner == nonce"),
        (test_ledger_steps.test_after_the_end_its_owner_is_told_how_it_ended_and_writes_nothing,),
        walk=True,
    ),
    Mutation(
        "fence: the whole",
        "any worker could write into any job",
        one(OWNED, "true"),
        (
            test_ledger_steps.test_the_old_owner_writes_nothing_after_another_has_claimed,
            test_ledger_steps.test_the_old_owner_writes_nothing_after_it_handed_the_job_back,
            test_ledger_ends.test_a_death_is_charged_to_the_owner_s_own_riders_only,
        ),
        walk=True,
    ),
    Mutation(
        "step: the position",
        "a step sent again after a lost reply would write its tokens twice, one after a lost tail would leave a gap",
        one(AT_ANOTHER),
        (
            test_ledger_steps.test_the_same_step_again_says_where_the_ledger_is_and_writes_nothing,
            test_ledger_steps.test_a_step_that_leaves_a_gap_is_not_written,
            test_ledger_steps.test_an_end_with_tokens_that_do_not_fit_is_not_written,
        ),
        walk=True,
    ),
    Mutation(
        "step: boarding is recorded only at the right position",
        "a worker that dies while it rewinds would be charged for a sequence that its child never had",
        one(
            f"{AT_ANOTHER}{BOARD}",
            f"{BOARD}{AT_ANOTHER}",
        ),
        (test_ledger_steps.test_boarding_at_a_wrong_position_is_not_recorded,),
    ),
    Mutation(
        "step: no script but accept, claim and terminal makes a key",
        "a zombie would make an expired log anew, without an expiry",
        one("redis.call('XADD', log_key(id), 'NOMKSTREAM', ", "redis.call('XADD', log_key(id), "),
        (test_ledger_steps.test_a_log_that_is_gone_is_not_made_again_by_a_step,),
    ),
    Mutation(
        "step: each slot in a pcall of its own",
        "an error in one slot would skip the next ones",
        one("local fine, result = pcall(one, KEYS[slot], a)", "local fine, result = true, one(KEYS[slot], a)"),
        (test_ledger_steps.test_an_error_in_one_slot_does_not_touch_the_others,),
    ),
    Mutation(
        "step: it renews the lease",
        "a job that comes forward would be taken from its owner",
        one("redis.call('HSET', key, 'lease', int(lease), 'stop', stop)", "redis.call('HSET', key, 'stop', stop)"),
        (
            test_ledger_steps.test_a_step_renews_the_lease_and_takes_back_the_invitation,
            test_ledger_steps.test_an_owner_may_renew_a_lease_that_ran_out_unclaimed,
        ),
    ),
    Mutation(
        "step: the deadline",
        "an owner that never renews in time for the reaper would not hear of it",
        one("  if stop == '' and NOW >= deadline then stop = 'expired' end\n  local lease", "  local lease"),
        (test_ledger_steps.test_a_passed_deadline_is_told_to_the_owner_as_a_stop,),
    ),
    Mutation(
        "step: the end it finds is told",
        "after a lost reply the owner would take its own end for a lost ride",
        one("if mine and j.status ~= 'running' and j.status ~= 'queued' then return { 'ended', j.k, j.status } end"),
        (test_ledger_steps.test_after_the_end_its_owner_is_told_how_it_ended_and_writes_nothing,),
    ),
    Mutation(
        "step: boarding is recorded",
        "nobody would know which sequences a dead process held: poison would never be found",
        one("if board ~= '' then redis.call('HSET', key, 'boarded', j.k) end"),
        (test_ledger_ends.test_the_third_death_at_one_place_ends_the_poison_job_alone,),
        walk=True,
    ),
    Mutation(
        "step: the text is the fold of the log",
        "a poll and a stream would show different texts",
        one("if text ~= '' then redis.call('APPEND', text_key(id), text) end"),
        (test_ledger_steps.test_steps_write_each_token_once_and_in_order,),
        walk=True,
    ),
)
