"""Fences between two releases on one ledger, and what happens without each."""

from __future__ import annotations

from tests import test_ledger_versions
from tests.mutation import Mutation, one

VERSIONS = (
    Mutation(
        "agree: the oldest that lives decides",
        "the first process of a new release would write what the others cannot read",
        one("oldest = math.min(oldest, tonumber(version))", "oldest = math.max(oldest, tonumber(version))"),
        (test_ledger_versions.test_while_a_process_of_the_older_release_lives_its_version_is_written,),
    ),
    Mutation(
        "agree: who is silent for long no longer counts",
        "a process that was killed would keep the ledger at its version for ever",
        one("redis.call('ZREMRANGEBYSCORE', versions, '-inf', int(NOW - C.version_gone))\n"),
        (test_ledger_versions.test_the_new_version_is_written_once_the_last_old_process_has_been_silent_for_a_minute,),
    ),
    Mutation(
        "agree: not in grace",
        "after an outage the first process that is heard would think itself alone",
        one("or (written > 0 and not past_grace()) then return written end", "then return written end"),
        (test_ledger_versions.test_after_an_outage_the_old_processes_are_heard_before_the_new_version_is_written,),
    ),
    Mutation(
        "agree: an outdated process does not count",
        "it would be told nothing, and hold up the next upgrade",
        one("if written > C.version or (written > 0 and written < C.version - 1) then return written end\n"),
        (
            test_ledger_versions.test_a_process_that_cannot_read_what_is_written_is_told_and_does_not_count,
            test_ledger_versions.test_a_process_two_releases_ahead_is_told_and_does_not_count,
        ),
    ),
    Mutation(
        "accept: the version that all read",
        "during a rolling upgrade jobs of the new API would wait for workers of the new release",
        one(
            "return int(math.min(C.version, tonumber(redis.call('GET', SCHEMA) or C.version)))", "return int(C.version)"
        ),
        (test_ledger_versions.test_while_a_process_of_the_older_release_lives_its_version_is_written,),
    ),
    Mutation(
        "accept: no version that its writer does not know",
        "an outdated API would call a record newer than the form that it gave it",
        one("int(math.min(C.version, tonumber(redis.call('GET', SCHEMA) or C.version)))", "redis.call('GET', SCHEMA)"),
        (test_ledger_versions.test_a_process_that_cannot_read_what_is_written_makes_jobs_that_all_can_read,),
    ),
    Mutation(
        "claim: only what the worker knows",
        "an old worker would ignore a parameter that a newer API has taken",
        one("  if value ~= cjson.null and not known[name] then return { 'newer', name } end\n"),
        (
            test_ledger_versions.test_a_job_that_asks_for_a_parameter_of_a_newer_release_is_left_to_a_worker_that_knows_it,
        ),
    ),
    Mutation(
        "claim: a parameter that is not asked for does not count",
        "jobs of a newer API would wait for newer workers, all of them",
        one("value ~= cjson.null and not known[name]", "not known[name]"),
        (test_ledger_versions.test_a_parameter_of_a_newer_release_that_is_not_asked_for_is_in_nobody_s_way,),
    ),
    Mutation(
        "claim: a marker has the version of its record",
        "an old worker that goes on with the job, or an old API that reads it, would find an entry that it cannot read",
        one('"worker":%s}\', j.v, j.k', '"worker":%s}\', int(C.version), j.k'),
        (test_ledger_versions.test_the_whole_log_of_a_job_has_the_version_of_its_record,),
    ),
    Mutation(
        "terminal: an end has the version of its record",
        "an old API that follows the job would never see it end",
        one('"error":%s}\', j.v, j.k,', '"error":%s}\', int(C.version), j.k,'),
        (test_ledger_versions.test_the_whole_log_of_a_job_has_the_version_of_its_record,),
    ),
    Mutation(
        "terminal: a group's end has the version of its record",
        "an old API that follows the group would never see it end",
        one('"status":%s}\', g.v,', '"status":%s}\', int(C.version),'),
        (test_ledger_versions.test_a_group_s_end_has_the_version_of_its_record,),
    ),
)
