"""Fences of priorities, files and batches, and what happens without each."""

from __future__ import annotations

from tasks.settings import Settings
from tests import test_ledger_batches, test_ledger_files, test_ledger_priorities
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Mutation, one


def a_batch_that_never_began_ends(ledger: LedgerOnAClock) -> None:
    test_ledger_batches.test_a_batch_that_never_began_ends_at_once_and_lets_go_of_its_input(ledger, "cancelled")


def a_batch_with_a_bad_input_ends(ledger: LedgerOnAClock) -> None:
    test_ledger_batches.test_a_batch_that_never_began_ends_at_once_and_lets_go_of_its_input(ledger, "failed")


def all_files_have_a_cap(ledger: LedgerOnAClock) -> None:
    small = LedgerOnAClock(ledger.client, Settings(max_files_bytes=10), ledger.changed)
    append = small.batch_calls.append_chunk
    small.run(append("file-a", 0, b"1234567"))
    assert small.run(append("file-b", 0, b"1234")) == 7


def what_has_expired_gives_its_room_back(ledger: LedgerOnAClock) -> None:
    small = LedgerOnAClock(ledger.client, Settings(max_files_bytes=10), ledger.changed)
    append = small.batch_calls.append_chunk
    small.run(append("file-a", 0, b"1234567"))
    small.advance(3601)
    assert small.run(append("file-b", 0, b"1234567")) is None


def a_job_is_kept_until_its_answer_is_written(ledger: LedgerOnAClock) -> None:
    short = LedgerOnAClock(ledger.client, Settings(retention_s=100), ledger.changed)
    test_ledger_batches.kept_until_its_answer_is_written(short)


PRIORITIES = (
    Mutation(
        "priority: it moves the place in the queue",
        "a batch of ten thousand would stand before everybody who comes after it",
        one(" + (R.priority - NORMAL) * PRIORITY_STEP_US"),
        (
            test_ledger_priorities.test_a_higher_priority_goes_before_what_came_earlier,
            test_ledger_batches.test_lines_wait_in_their_order_behind_everything_of_normal_priority,
        ),
    ),
    Mutation(
        "priority: its bound",
        "a low job would be overtaken for hours, as long as normal ones keep coming",
        one("local PRIORITY_STEP_US = 150000000", "local PRIORITY_STEP_US = 1500000000"),
        (test_ledger_priorities.test_a_low_job_is_overtaken_only_by_normal_ones_that_come_within_ten_minutes,),
    ),
    Mutation(
        "priority: a hand-back keeps the place",
        "a drain would turn low jobs into normal ones",
        one("'order', int(first + i)", "'order', int(NOW_US + place + i)"),
        (test_ledger_priorities.test_a_job_that_is_handed_back_keeps_the_place_that_its_priority_gave_it,),
    ),
)

FILES = (
    Mutation(
        "file: a chunk counts once",
        "a chunk whose reply was lost is sent again: the room for files would shrink for as long as the file lives",
        one("local more = #ARGV[4] - redis.call('STRLEN', key)", "local more = #ARGV[4]"),
        (test_ledger_files.test_a_chunk_that_is_sent_twice_counts_once,),
    ),
    Mutation(
        "file: the cap",
        "uploads would fill the server, and no job could be accepted any more",
        one("if files_total() + more > C.files_most then", "if false then"),
        (all_files_have_a_cap,),
    ),
    Mutation(
        "file: what has expired is given back",
        "after some weeks there would be no room for files for ever",
        one("forget_expired_files()\nlocal id", "local id"),
        (what_has_expired_gives_its_room_back,),
    ),
    Mutation(
        "file: every chunk is there",
        "an upload of hours would lose its beginning, and a batch would skip those lines",
        one("  if redis.call('EXISTS', chunk_key(R.id, n)) == 0 then return { 'lost', R.id } end\n"),
        (test_ledger_files.test_an_upload_that_lost_a_chunk_is_no_file,),
    ),
    Mutation(
        "file: a second end changes nothing",
        "a reply that was lost would have the file made anew, and its time begin again",
        one("if redis.call('EXISTS', file_key(R.id)) == 1 then return { 'ok', R.id } end\n"),
        (test_ledger_files.test_a_chunk_that_is_sent_twice_counts_once,),
    ),
    Mutation(
        "file: a batch needs it",
        "the rest of the input would be gone",
        one("if f.batches ~= '' and f.batches ~= '0' then return 'in_use' end\n"),
        (test_ledger_batches.test_files_of_a_batch_stay_until_it_has_ended,),
    ),
    Mutation(
        "file: a batch's input lives as long as the batch",
        "an input that expires in an hour would be gone before a long batch has read it",
        one("if tonumber(f.expires_at) < expires then expire_file(R.file, expires) end\n"),
        (test_ledger_batches.test_files_of_a_batch_stay_until_it_has_ended,),
    ),
    Mutation(
        "file: an unfinished upload expires",
        "an API that dies within an upload would leave its chunks for ever",
        one("redis.call('SET', key, ARGV[4], 'PX', int(C.upload))", "redis.call('SET', key, ARGV[4])"),
        (test_ledger_batches.test_no_key_of_a_batch_is_without_an_expiry_at_any_point_of_its_life,),
    ),
    Mutation(
        "file: the expiry of what a batch writes",
        "the output of a batch whose servers are gone would stay for ever",
        one("  redis.call('PEXPIREAT', chunk_key(id, n - 1), int(expires))\n"),
        (test_ledger_batches.test_no_key_of_a_batch_is_without_an_expiry_at_any_point_of_its_life,),
    ),
)

BATCHES = (
    Mutation(
        "batch: the cursor stands where the feeder read it",
        "two feeders, or one whose reply was lost, would make the jobs of a page anew, and take back what they had",
        one("if b.line ~= R.from then return 'moved' end\n"),
        (test_ledger_batches.test_a_feeder_that_runs_twice_makes_each_job_once,),
    ),
    Mutation(
        "batch: the window",
        "two feeders together would accept without a bound, and ten thousand jobs would be in memory at once",
        one(
            "ZCARD', open_key(R.id)) + num_jobs > C.batch_window then return", "ZCARD', open_key(R.id)) < 0 then return"
        ),
        (test_ledger_batches.test_a_batch_never_has_more_lines_open_than_its_window,),
    ),
    Mutation(
        "batch: no job once it turns to its end",
        "a page that was read before a cancel would be run after it",
        one("if num_jobs > 0 and b.status ~= 'in_progress' then return 'turned' end\n"),
        (
            test_ledger_batches.test_a_cancelled_batch_takes_no_further_job_and_ends_with_those_that_ride,
            test_ledger_batches.test_a_batch_whose_time_is_over_takes_no_further_job,
        ),
    ),
    Mutation(
        "batch: nothing before it was validated or after its last line",
        "a late page would go on with a batch that has ended, or bring back one that has expired, without an expiry",
        one("if b.fed ~= '' or b.status == 'validating' or b.status == '' then return 'over' end\n"),
        (
            test_ledger_batches.test_a_batch_ends_when_its_last_line_is_taken_and_answered,
            test_ledger_batches.test_a_batch_that_is_gone_is_looked_for_no_more,
        ),
    ),
    Mutation(
        "batch: an answer is written by who takes its line out",
        "two that serve a batch would each write the answer",
        one(
            " and redis.call('ZREM', open_key(id), line) == 1 then",
            " and redis.call('ZREM', open_key(id), line) >= 0 then",
        ),
        (test_ledger_batches.test_an_answer_is_written_once_however_often_it_is_brought,),
    ),
    Mutation(
        "batch: the job has ended",
        "after a lost tail of Redis a job rides again, and its old answer would be written before its new end",
        one("if status ~= 'queued' and status ~= 'running' and redis.call('ZREM'", "if redis.call('ZREM'"),
        (test_ledger_batches.test_the_answer_of_a_job_that_has_not_ended_is_not_written,),
    ),
    Mutation(
        "batch: its last line was taken and nothing is open",
        "a batch whose window is empty for a moment would count as completed",
        one("if b.fed ~= '1' or redis.call('ZCARD', open_key(id)) > 0 then return end\n"),
        (test_ledger_batches.test_a_batch_ends_when_its_last_line_is_taken_and_answered,),
    ),
    Mutation(
        "batch: its lines end with it",
        "a line that is taken late would have another day",
        one("  if R.latest then deadline = math.min(deadline, R.latest) end\n"),
        (test_ledger_batches.test_a_line_has_at_most_the_time_that_its_batch_has,),
    ),
    Mutation(
        "batch: a job is kept until its answer is written",
        "with no API up for a day, answers would be gone that were given",
        (
            ("(j.group ~= '' or j.batch ~= '') and redis", "(j.group ~= '') and redis"),
            ("g.batch ~= '' and redis.call('PEXPIRETIME', key) or NOW", "NOW"),
        ),
        (a_job_is_kept_until_its_answer_is_written,),
    ),
    Mutation(
        "batch: from then on for its retention",
        "ten thousand records would stay for two days instead of one",
        one("      expire_job(job, at)\n    end\n    num_written", "    end\n    num_written"),
        (a_job_is_kept_until_its_answer_is_written,),
    ),
    Mutation(
        "batch: a job whose answer is not written cannot be forgotten",
        "its answer and its custom_id would be gone",
        one("string.match(id, '%d+$')) then return 'open' end", "'')  then return 'open' end"),
        (test_ledger_batches.test_a_line_is_not_forgotten_before_its_answer_is_written,),
    ),
    Mutation(
        "batch: who serves it is told of each end",
        "the next line would wait for the next second",
        (("  tell_batch(j.batch, j.v, status)\n", ""), ("  tell_batch(g.batch, g.v, g.worst)\n", "")),
        (test_ledger_batches.test_the_end_of_a_line_is_told_on_the_channel_of_the_batch,),
    ),
    Mutation(
        "batch: the time is over",
        "a batch without workers would never end",
        one("if NOW >= tonumber(b.deadline) and (b.status", "if false and (b.status"),
        (test_ledger_batches.test_a_batch_whose_time_is_over_takes_no_further_job,),
    ),
    Mutation(
        "batch: validated once",
        "a batch that was cancelled meanwhile would begin",
        one("if b.status ~= 'validating' then return b.status end\n"),
        (a_batch_that_never_began_ends,),
    ),
    Mutation(
        "batch: it lets go of its input",
        "the input could never be deleted",
        one("redis.call('HINCRBY', file_key(b.file), 'batches', -1)", "redis.call('EXISTS', file_key(b.file))"),
        (a_batch_that_never_began_ends, a_batch_with_a_bad_input_ends),
    ),
    Mutation(
        "batch: an id that is known",
        "a lost reply would put the batch back to its beginning",
        one("if redis.call('EXISTS', key) == 1 then return { 'again', R.id } end\n"),
        (test_ledger_batches.test_a_batch_is_made_once,),
    ),
    Mutation(
        "batch: its expiry",
        "a batch that nobody serves would stay for ever",
        one(
            "redis.call('PEXPIREAT', key, int(expires))\nredis.call('HINCRBY', file_key(R.file)",
            "redis.call('HINCRBY', file_key(R.file)",
        ),
        (test_ledger_batches.test_no_key_of_a_batch_is_without_an_expiry_at_any_point_of_its_life,),
    ),
    Mutation(
        "batch: the expiry of its open lines",
        "they would outlive it",
        one("redis.call('PEXPIREAT', open_key(R.id), redis.call('PEXPIRETIME', key))\n"),
        (test_ledger_batches.test_no_key_of_a_batch_is_without_an_expiry_at_any_point_of_its_life,),
    ),
)
