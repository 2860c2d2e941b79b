"""Every name in Redis: who writes it, what it holds, how long it lives.

| key | holds | written by | lives |
|---|---|---|---|
| `{carpool}:j:<id>` hash | the record of a job | scripts | deadline + retention, from its end on: retention |
| `{carpool}:l:<id>` stream | its log | claim, step, terminal | as the record |
| `{carpool}:t:<id>` string | its text so far | accept, step, terminal | as the record |
| `{carpool}:g:<id>` hash | a group of jobs | accept, terminal | as its children, who stay until it has ended |
| `{carpool}:idem:<hash>` hash | an idempotency key: job id, hash of the body | accept | as the record, at least CARPOOL_IDEMPOTENCY_S |
| `{carpool}:att:<id>` zset | who waits for a job, until when | API | half a minute, renewed |
| `{carpool}:tomb:<id>` | a task sent with plain Celery has ended | terminal | 7 days |
| `{carpool}:wait:<pool>`, `{carpool}:inv:<pool>` zsets | queued jobs in order; invited when | scripts | as the longest job |
| `{carpool}:queued:<pool>` hash, `{carpool}:load:<pool>` hash | what each queued job weighs; the sums, of all and of each owner | scripts | as the longest job, or until nothing waits |
| `{carpool}:own:<length>:<owner>:<pool>` zset, `{carpool}:shares:<pool>` zset | an owner's queued jobs in order (the length is that of the owner's name); the virtual time of each owner of whom something waits | scripts | as the longest job |
| `{carpool}:use:<pool>` hash | the virtual time of a pool; of each owner its own, and the mean use of its jobs | scripts | as the longest job, at least an hour from the last one's end on |
| `{carpool}:rate:<pool>` hash | how fast a pool is, by its last jobs | terminal | 7 days after the last one |
| `{carpool}:seen` list | what happened to jobs and metrics have not counted yet | claim, step, child_died, terminal; tally | a second, at most a day |
| `{carpool}:counted:<pool>` hash, `{carpool}:generated` hash | what metrics count: numbers that only rise; tokens by pool | tally, observe; step | 30 days after the last job |
| `{carpool}:lost:<pool>` zset | jobs whose worker is gone, until when that is believed | reaper | a minute |
| `{carpool}:pools` zset | pools in which something has waited, until when | accept, release | as the longest job |
| `{carpool}:due` zset | when to look at a job next | scripts | as the longest job |
| `{carpool}:jobs:<key>` zset | an API key's jobs by time; `all` without keys | accept | as the longest job |
| `{carpool}:live:<key>` zset | an API key's jobs that have not ended | accept, terminal | as the longest job |
| `{carpool}:minute:<key>` hash | an API key's requests and tokens, second by second | accept, spend, terminal | a minute |
| `{carpool}:f:<id>` hash, `{carpool}:f:<id>:<n>` strings | a file, its chunks | files' and batches' scripts | as the file says; at least as a batch that reads it |
| `{carpool}:files`, `{carpool}:files:of:<key>`, `{carpool}:files:until` zsets, `{carpool}:files:bytes` hash | files by time, those of an API key; until when; what each takes, and all | files' and batches' scripts | as the longest file |
| `{carpool}:b:<id>` hash, `{carpool}:b:<id>:open` zset | a batch with its cursor; lines whose answers are not written | batches' scripts | deadline + retention, from its end on: as its output |
| `{carpool}:b:<id>:lock` string | who serves a batch | API | seconds, renewed |
| `{carpool}:batches`, `{carpool}:batches:of:<key>`, `{carpool}:batches:live` zsets | batches by time, those of an API key; those that have not ended | batches' scripts | as the longest batch |
| `{carpool}:w:<incarnation>` hash, `{carpool}:ws:<pool>` zset | a worker's heartbeat; the workers of a pool | heartbeat | five heartbeats |
| `{carpool}:card:<hash>` string | a tokenizer and a chat template, for the API to count with | worker | an hour after the last heartbeat |
| `{carpool}:tick`, `{carpool}:grace`, `{carpool}:reaper` | last look of the reaper; end of grace; its lock | reaper | minutes |
| `celery-task-meta-<id>` string | Celery's result record | claim, terminal | as the record |
| `{carpool}:versions` zset | versions that living processes read, when last heard | keeper | two minutes |
| `{carpool}:hook` zset | jobs whose webhook is not delivered: when to look at it next | accept, terminal, webhooks' scripts | as the longest job |
| `{carpool}:hook:workers` zset | workers that deliver webhooks, until when they count as alive | webhooks' scripts | seconds, renewed |
| `{carpool}:probe` string | whether Redis takes writes | API | seconds |
| `{carpool}:apikeys` hash, `{carpool}:apikeys:rev` string | API keys by the SHA-256 of their secrets; what changes with each change | `carpool keys`, API | for ever, constant in number |
| `{carpool}:models` hash, `{carpool}:schema` string | pools that have ever been served; the version that new records get | worker; start, keeper | for ever, constant in number |
| `carpool.<pool>`, `carpool.webhooks`, `carpool` lists, `_kombu.binding.*`, `{carpool}:unacked*` | the broker's own | kombu | kombu's |

Channels carry the database's number, because PUBLISH ignores it.
"""

from __future__ import annotations

PREFIX = "{carpool}:"
DUE = f"{PREFIX}due"
TICK = f"{PREFIX}tick"
GRACE = f"{PREFIX}grace"
REAPER = f"{PREFIX}reaper"
MODELS = f"{PREFIX}models"
SCHEMA = f"{PREFIX}schema"
VERSIONS = f"{PREFIX}versions"
POOLS = f"{PREFIX}pools"
PROBE = f"{PREFIX}probe"
API_KEYS = f"{PREFIX}apikeys"
API_KEYS_REVISION = f"{PREFIX}apikeys:rev"
#: Whose everything is that was made without an API key.
NO_KEY = "all"

FILES = f"{PREFIX}files"
FILES_UNTIL = f"{PREFIX}files:until"
FILES_BYTES = f"{PREFIX}files:bytes"
BATCHES = f"{PREFIX}batches"
BATCHES_LIVE = f"{PREFIX}batches:live"

SEEN = f"{PREFIX}seen"
GENERATED = f"{PREFIX}generated"
HOOKS = f"{PREFIX}hook"
HOOK_WORKERS = f"{PREFIX}hook:workers"

UNACKED = f"{PREFIX}unacked"
UNACKED_INDEX = f"{PREFIX}unacked_index"
UNACKED_MUTEX = f"{PREFIX}unacked_mutex"

#: Queue of tasks that are sent with plain Celery, without the API.
NATIVE_QUEUE = "carpool"
TASK_NAME = "carpool.generate"
#: The pool of this name would have the queue of the webhooks.
RESERVED_POOL = "webhooks"
WEBHOOK_QUEUE = "carpool.webhooks"
WEBHOOK_TASK = "carpool.deliver_webhook"


def record(id: str) -> str:
    return f"{PREFIX}j:{id}"


def log(id: str) -> str:
    return f"{PREFIX}l:{id}"


def text(id: str) -> str:
    return f"{PREFIX}t:{id}"


def group(id: str) -> str:
    return f"{PREFIX}g:{id}"


def idempotency(scope_hash: str) -> str:
    return f"{PREFIX}idem:{scope_hash}"


def attached(id: str) -> str:
    return f"{PREFIX}att:{id}"


def jobs(owner: str) -> str:
    """An API key's jobs by time."""
    return f"{PREFIX}jobs:{owner}"


def live(owner: str) -> str:
    """An API key's jobs that have not ended."""
    return f"{PREFIX}live:{owner}"


def minute(owner: str) -> str:
    """What an API key has asked for within the minute."""
    return f"{PREFIX}minute:{owner}"


def files(owner: str) -> str:
    """An API key's files by time."""
    return FILES if owner == NO_KEY else f"{FILES}:of:{owner}"


def batches(owner: str) -> str:
    """An API key's batches by time."""
    return BATCHES if owner == NO_KEY else f"{BATCHES}:of:{owner}"


def file(id: str) -> str:
    return f"{PREFIX}f:{id}"


def file_chunk(id: str, n: int) -> str:
    return f"{PREFIX}f:{id}:{n}"


def batch(id: str) -> str:
    return f"{PREFIX}b:{id}"


def batch_open(id: str) -> str:
    return f"{PREFIX}b:{id}:open"


def batch_lock(id: str) -> str:
    return f"{PREFIX}b:{id}:lock"


def wait(pool: str) -> str:
    return f"{PREFIX}wait:{pool}"


def invited(pool: str) -> str:
    return f"{PREFIX}inv:{pool}"


def queued(pool: str) -> str:
    return f"{PREFIX}queued:{pool}"


def load(pool: str) -> str:
    return f"{PREFIX}load:{pool}"


def own(pool: str, owner: str) -> str:
    return f"{PREFIX}own:{len(owner.encode())}:{owner}:{pool}"


def shares(pool: str) -> str:
    return f"{PREFIX}shares:{pool}"


def use(pool: str) -> str:
    return f"{PREFIX}use:{pool}"


def rate(pool: str) -> str:
    return f"{PREFIX}rate:{pool}"


def counted(pool: str) -> str:
    return f"{PREFIX}counted:{pool}"


def lost(pool: str) -> str:
    return f"{PREFIX}lost:{pool}"


def worker(incarnation: str) -> str:
    return f"{PREFIX}w:{incarnation}"


def pool_workers(pool: str) -> str:
    return f"{PREFIX}ws:{pool}"


def card(digest: str) -> str:
    return f"{PREFIX}card:{digest}"


def queue(pool: str) -> str:
    """The pool's Celery queue, which is also the name of kombu's list."""
    return f"carpool.{pool}"


def celery_result(id: str) -> str:
    """Celery's own record of a task's result, and the channel on which it is published."""
    return f"celery-task-meta-{id}"


def channel(db: int, id: str) -> str:
    """Where a job's log entries are published."""
    return f"{PREFIX}{db}:c:{id}"


def owner_channel(db: int, incarnation: str) -> str:
    """Where a worker is told that one of its riders has to stop."""
    return f"{PREFIX}{db}:o:{incarnation}"


def webhooks_channel(db: int) -> str:
    """Where it is published that the event of a job's end is to be delivered."""
    return f"{PREFIX}{db}:hooks"
