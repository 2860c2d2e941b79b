"""Fences of what API keys may and see, and what happens without each."""

from __future__ import annotations

from tests import test_ledger_key_limits
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Mutation, one


def a_cancelled_job_is_none_of_those_at_once(ledger: LedgerOnAClock) -> None:
    test_ledger_key_limits.test_jobs_at_once_are_those_that_have_not_ended_however_they_end(ledger, "cancelled")


def a_poison_job_is_none_of_those_at_once(ledger: LedgerOnAClock) -> None:
    test_ledger_key_limits.test_jobs_at_once_are_those_that_have_not_ended_however_they_end(ledger, "poison")


KEYS = (
    Mutation(
        "key: a job that has ended is none of those at once",
        "a key would be locked out for a day after its first few jobs",
        one("  redis.call('ZREM', live_key(j.key), id)\n"),
        (a_cancelled_job_is_none_of_those_at_once, a_poison_job_is_none_of_those_at_once),
        walk=True,
    ),
    Mutation(
        "key: a job that was accepted is one of those at once",
        "the bound on jobs at once would be none",
        one("hold_live(R)\nlist_in_index", "list_in_index"),
        (
            test_ledger_key_limits.test_the_children_of_a_group_count_one_by_one,
            test_ledger_key_limits.test_a_job_that_is_handed_back_or_whose_worker_died_still_counts,
        ),
        walk=True,
    ),
    Mutation(
        "key: the window slides",
        "at the turn of each minute a key would have two minutes' worth",
        one("local first = math.floor(NOW / 1000) - MINUTE_S", "local first = math.floor(NOW / 60000) * 60"),
        (test_ledger_key_limits.test_no_minute_holds_more_requests_than_the_limit_wherever_it_begins,),
    ),
    Mutation(
        "key: a second counts until all of it is a minute ago",
        "requests late in a second would be forgotten almost a second too early",
        (("local first = math.floor(NOW / 1000) - MINUTE_S", "local first = math.floor(NOW / 1000) - MINUTE_S + 1"),),
        (test_ledger_key_limits.test_no_minute_holds_more_requests_than_the_limit_wherever_it_begins,),
    ),
    Mutation(
        "key: what was not used is given back",
        "a request that leaves max_tokens open would use up the whole minute",
        one("  redis.call('HSET', minute_key(j.key), second,", "  string.format('%s%s',  second,"),
        (
            test_ledger_key_limits.test_the_end_of_a_job_gives_back_the_tokens_that_it_did_not_use,
            test_ledger_key_limits.test_one_that_used_more_than_it_was_counted_with_is_counted_right_in_the_end,
        ),
    ),
    Mutation(
        "key: only to its own minute",
        "a second that has gone would be there again, without an expiry",
        one("  if not requests then return end\n", "  requests, tokens = requests or '0', tokens or 0\n"),
        (test_ledger_key_limits.test_a_late_end_leaves_no_key_behind,),
    ),
    Mutation(
        "key: what is refused is not counted",
        "a client that tries again too early would never get through",
        one("  if refused then return refused, left() end\n  if limits.rpm == 0", "  if limits.rpm == 0"),
        (test_ledger_key_limits.test_a_refused_request_leaves_nothing_behind,),
    ),
    Mutation(
        "key: the minute expires",
        "each key that was ever used would leave a record for ever",
        one("  redis.call('PEXPIREAT', minute_key(key), int(NOW + (MINUTE_S + 2) * 1000))\n"),
        (test_ledger_key_limits.test_nothing_of_a_key_s_limits_is_without_an_expiry,),
    ),
    Mutation(
        "key: the jobs at once expire",
        "each key that was ever used would leave a set for ever",
        one("    keep_until(live_key(R.key), int(expires))\n"),
        (test_ledger_key_limits.test_nothing_of_a_key_s_limits_is_without_an_expiry,),
        walk=True,
    ),
    Mutation(
        "key: what is another's is not there",
        "everybody would read, cancel and delete everybody's jobs",
        one("return owner == '' or owner_of(id) == owner end", "return true end"),
        (test_ledger_key_limits.test_what_another_key_has_made_is_not_there,),
    ),
    Mutation(
        "key: the children of a group are its owner's",
        "another key could read them by their ids",
        one("      'key', R.key, 'counted',", "      'key', group == '' and R.key or '', 'counted',"),
        (test_ledger_key_limits.test_what_another_key_has_made_is_not_there,),
    ),
)
