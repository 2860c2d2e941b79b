"""What was seen: by each client, in the ledger at the end, and of each fault. The judge compares them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from ops.soak.plans import Plan
from tasks.entries import Entry

ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "expired"})
#: lost: accepted and not there. doubled: two jobs, two ends, a token twice. gapped: a token is missing or out of order.
#: stuck: no end. wrong: another end or text than the right one. left: something that should be gone.
FaultKind = Literal["lost", "doubled", "gapped", "stuck", "wrong", "left"]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = ("lost", "doubled", "gapped", "stuck", "wrong", "left")


@dataclass(slots=True)
class Sighting:
    """What the client of one plan saw.

    Attributes:
        accepted_at: when an answer first said that the job exists (seconds since the epoch); None: none did.
        ids: the job ids that answers named, each once, in the order they came.
        have: tokens that its streams have brought.
        text: what they add up to, or the answer of a synchronous request, a text for each part.
        status: how the job ended, as the client was told; "" where it was not told.
        faults: what no client should see, and what of it, in words.
        cuts: streams that the client cut itself; breaks: those that were cut for it.
        left: it went away on purpose and for good, which may cancel its job.
        asked_to_cancel: it has sent a cancel.
        gave_up: no answer within its patience.
    """

    plan: Plan
    accepted_at: float | None = None
    ended_at: float | None = None
    ids: list[str] = field(default_factory=list)
    have: int = 0
    texts: list[str] | None = None
    status: str = ""
    faults: list[tuple[FaultKind, str]] = field(default_factory=list)
    cuts: int = 0
    breaks: int = 0
    left: bool = False
    asked_to_cancel: bool = False
    gave_up: str = ""


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A job as the ledger holds it at the end.

    Attributes:
        group: id of its group, "" where it is alone.
        rides: how often it was claimed.
        deaths: of processes that it rode in, as far as they were charged to it.
        log: entry ids and entries, in the log's order.
    """

    id: str
    prompt: str
    seed: int
    status: str
    k: int
    text: str
    group: str = ""
    error_code: str = ""
    error_message: str = ""
    rides: int = 0
    deaths: int = 0
    log: tuple[tuple[str, Entry], ...] = ()


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that was injected.

    Attributes:
        at: seconds since the epoch.
        since: the same moment, of `time.monotonic`.
        what: whom it met, in words.
    """

    kind: str
    at: float
    since: float
    what: str


@dataclass(slots=True)
class Leftovers:
    """What should be gone at the end, by what it is: names of keys, numbers of slots, messages."""

    slots_taken: int = 0
    keys_without_ttl: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    messages: int = 0
    processes: tuple[str, ...] = ()
