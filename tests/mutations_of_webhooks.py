"""Fences of webhooks, and what happens without each."""

from __future__ import annotations

import contextlib

from tests import test_ledger_webhooks as claims
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Mutation, one

_MARK = "        into_outbox(id, NOW + HOOK_MESSAGE, redis.call('PEXPIRETIME', record_key(id)))\n"


def no_attempt_begins_while_the_job_lives(ledger: LedgerOnAClock) -> None:
    ledger.accept(webhook=claims.URL)
    with contextlib.suppress(ValueError):  # a job that lives has no time of its end
        claims.Webhooks(ledger).claim()
    assert ledger.field("j", "hook_nonce") == ""


def every_end_is_in_the_outbox(ledger: LedgerOnAClock) -> None:
    claims.test_every_end_of_a_job_with_a_webhook_is_in_the_outbox_with_it(ledger, claims.by_its_owner)


WEBHOOKS = (
    Mutation(
        "terminal: the event is in the outbox with the end",
        "an end would be told only when somebody happens to look at the job",
        one("    into_outbox(id, NOW, at)\n    redis.call('PUBLISH'", "    redis.call('PUBLISH'"),
        (every_end_is_in_the_outbox,),
    ),
    Mutation(
        "terminal: who delivers hears of it",
        "each event would wait for the next look",
        one("    redis.call('PUBLISH', P .. C.db .. ':hooks', id)\n"),
        (every_end_is_in_the_outbox,),
    ),
    Mutation(
        "accept: a job with a webhook is in the outbox from then on",
        "an end that a process of the release before wrote would never be told",
        one("  into_outbox(R.id, NOW + HOOK_LOOK, at)\n"),
        (claims.test_an_end_that_a_release_without_webhooks_wrote_is_found_within_a_minute,),
        walk=True,
    ),
    Mutation(
        "webhook_pump: a live job stays where it is",
        "its event would be sent before its end, or never",
        one(
            "      elseif is_live(j.status) then\n",
            "      elseif is_live(j.status) then\n        leave_outbox(id)\n      elseif false then\n",
        ),
        (claims.test_a_live_job_is_looked_at_now_and_then_and_nothing_is_sent,),
        walk=True,
    ),
    Mutation(
        "webhook_pump: a mark on what was sent",
        "each look would send everything once more",
        one(_MARK + "        send_message", "        send_message"),
        (claims.test_a_message_that_nobody_takes_is_sent_again,),
    ),
    Mutation(
        "webhook_pump: few messages",
        "the broker would fix the order, and a worker that ends would leave thousands of messages",
        one("      elseif room > 0 then\n", "      else\n"),
        (claims.test_few_messages_are_in_the_broker_and_the_longest_due_come_first,),
    ),
    Mutation(
        "webhook_pump: what lies in the broker counts",
        "each look would send as many again",
        one("local room, sent = most - redis.call('LLEN', HOOK_QUEUE), 0", "local room, sent = most, 0"),
        (claims.test_few_messages_are_in_the_broker_and_the_longest_due_come_first,),
    ),
    Mutation(
        "webhook_pump: what is gone leaves the outbox",
        "a job that has expired would be looked at for ever",
        one(
            "      if j.webhook == '' or j.hook ~= '' then\n        leave_outbox(id)\n",
            "      if j.webhook == '' or j.hook ~= '' then\n",
        ),
        (claims.test_a_record_that_has_expired_leaves_the_outbox,),
    ),
    Mutation(
        "webhook_claim: one attempt at a time",
        "a doubled message would tell the receiver twice at once",
        one("  if j.hook_nonce ~= '' and NOW < tonumber(j.hook_lease) then return { 'taken' } end\n"),
        (claims.test_one_attempt_at_a_time,),
    ),
    Mutation(
        "webhook_claim: not before its time",
        "a doubled message would make the waits between attempts shorter",
        one("  elseif j.hook_next ~= '' and NOW < tonumber(j.hook_next) then\n    return { 'early' }\n"),
        (claims.test_what_failed_is_tried_again_when_its_time_has_come_and_not_before,),
    ),
    Mutation(
        "webhook_claim: sent again with its nonce",
        "a claim whose reply was lost would hold up its own attempt",
        one("if j.hook_nonce ~= ARGV[3] then\n  if", "if true then\n  if"),
        (claims.test_a_claim_whose_reply_was_lost_is_the_same_attempt,),
    ),
    Mutation(
        "webhook_claim: a lease",
        "the event of a worker that died would be looked at too soon, or never",
        one("  into_outbox(id, lease, redis.call('PEXPIRETIME', key))\n"),
        (claims.test_a_worker_that_dies_in_an_attempt_leaves_it_to_the_next_one,),
    ),
    Mutation(
        "webhook_claim: a job that lives is not told of",
        "the receiver would be told of an end that is none",
        one("if is_live(j.status) then return { 'live' } end\n"),
        (no_attempt_begins_while_the_job_lives,),
    ),
    Mutation(
        "webhook_claim: over is over",
        "a message that comes late would tell the receiver once more",
        one(
            "if j.webhook == '' or j.hook ~= '' then\n  leave_outbox(id)\n  return", "if j.webhook == '' then\n  return"
        ),
        (claims.test_a_delivered_event_is_over,),
    ),
    Mutation(
        "webhook_claim: attempts that kill their worker have an end",
        "a receiver that is fatal for us would kill workers for as long as the job is kept",
        one(
            "    if NOW >= tonumber(j.finished_at) + C.hook_span then\n",
            "    if false then\n",
        ),
        (claims.test_attempts_that_kill_their_worker_are_given_up_too,),
    ),
    Mutation(
        "webhook_claim: a record of a newer release",
        "this release would misread what the next one writes",
        one("if tonumber(j.v) > C.version then return { 'newer' } end\n\n"),
        (claims.test_the_event_of_a_newer_release_s_record_is_left_to_a_worker_that_reads_it,),
    ),
    Mutation(
        "webhook_settle: only the attempt that runs",
        "a sleeper that wakes up would end the attempt of the next one, and an end that is told twice count twice",
        one("  if j.webhook == '' or j.hook_nonce ~= ARGV[3] then return 'fenced' end\n"),
        (
            claims.test_one_attempt_at_a_time,
            claims.test_an_end_of_an_attempt_that_is_told_twice_counts_once,
            claims.test_a_worker_that_dies_in_an_attempt_leaves_it_to_the_next_one,
            claims.test_a_forgotten_job_takes_its_event_along,
        ),
    ),
    Mutation(
        "webhook_settle: the attempt is over",
        "the next one would wait for its lease",
        one("  redis.call('HSET', key, 'hook_nonce', '')\n  local next_at", "  local next_at"),
        (claims.test_an_end_of_an_attempt_that_is_told_twice_counts_once,),
    ),
    Mutation(
        "webhook_settle: what sent nothing does not count",
        "events that wait for a slow host would look as if they had been tried",
        one("    redis.call('HSET', key, 'hook_n', int(tonumber(j.hook_n) - 1))\n"),
        (claims.test_an_attempt_that_sent_nothing_does_not_count,),
    ),
    Mutation(
        "webhook_settle: the span has an end",
        "a receiver that is gone would be asked for ever",
        one("if outcome == 'retry' and NOW < last - 1000 then", "if outcome == 'retry' then"),
        (
            claims.test_the_last_attempt_comes_at_the_end_of_the_span_and_then_it_is_given_up,
            claims.test_an_event_that_no_worker_was_there_for_is_tried_once_whatever_the_span,
        ),
    ),
    Mutation(
        "webhook_settle: a last attempt at the end of the span",
        "a receiver that asks for more time than is left would not be told at all",
        one("    next_at = math.min(next_at, last)\n"),
        (claims.test_the_last_attempt_comes_at_the_end_of_the_span_and_then_it_is_given_up,),
    ),
    Mutation(
        "webhook_settle: what is over leaves the outbox",
        "it would be looked at for as long as the job is kept",
        one(
            "  redis.call('HSET', key, 'hook', status, 'hook_nonce', '')\n  leave_outbox(id)\n",
            "  redis.call('HSET', key, 'hook', status, 'hook_nonce', '')\n",
        ),
        (claims.test_a_delivered_event_is_over, claims.test_a_receiver_that_wants_no_more_ends_it),
        walk=True,
    ),
    Mutation(
        "webhook_settle: who settles sends what is next",
        "many events would wait for looks, a few at each",
        one("local sent = send_due_webhooks(ARGV[9], tonumber(ARGV[10]))", "local sent = { 0, '-1' }"),
        (claims.test_few_messages_are_in_the_broker_and_the_longest_due_come_first,),
    ),
    Mutation(
        "webhook: a job is kept until its event is delivered",
        "with a short retention the job would be gone while its receiver is away",
        one(
            "return webhook ~= '' and math.max(kept_for(idem), C.hook_span + 3600000) or kept_for(idem)",
            "return kept_for(idem)",
        ),
        (claims.test_a_job_is_kept_until_its_event_is_delivered_and_then_for_its_retention,),
    ),
    Mutation(
        "webhook: from then on for its retention",
        "jobs would be kept longer than they are said to be",
        one(
            "  if at < redis.call('PEXPIRETIME', key) then\n    expire_job(id, int(at))\n    if idem",
            "  if false then\n    expire_job(id, int(at))\n    if idem",
        ),
        (claims.test_a_job_is_kept_until_its_event_is_delivered_and_then_for_its_retention,),
    ),
    Mutation(
        "webhook: a longer retention stands",
        "a delivery would shorten what the client was promised",
        one(
            "  if at < redis.call('PEXPIRETIME', key) then\n    expire_job(id, int(at))\n    if idem",
            "  if true then\n    expire_job(id, int(at))\n    if idem",
        ),
        (claims.test_a_delivery_does_not_shorten_a_longer_retention_nor_lengthen_it,),
    ),
    Mutation(
        "forget: the event goes with its job",
        "the outbox would hold what is gone",
        one("redis.call('ZREM', HOOKS, id) -- what is not delivered is given up with the job\n"),
        (claims.test_a_forgotten_job_takes_its_event_along,),
    ),
)
