"""A mutation of the ledger's scripts: one fence less, and which tests have to miss it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.ledger import script_text
from tests.ledger_harness import ChangedScripts, LedgerOnAClock

SCRIPTS = (
    "accept", "agree", "attach", "batch_cancel", "batch_create", "batch_drain", "batch_feed", "batch_look",
    "batch_validated", "cancel", "child_died", "claim", "detach", "fail", "file_append", "file_delete", "file_finish",
    "forget", "gauges", "heartbeat", "list", "look", "observe", "pump", "reap", "release", "spend", "step", "tally",
    "unclaimed", "view",
    "webhook_claim", "webhook_pump", "webhook_settle",
)  # fmt: skip
LUA = Path(__file__).parent.parent / "tasks" / "lua"
#: A test that takes a ledger alone.
Claim = Callable[[LedgerOnAClock], None]
#: The fence of every write of an owner.
OWNED = "j.status == 'running' and j.epoch == epoch and j.owner == nonce"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fence less.

    Attributes:
        name: what is taken away.
        why: what the fence guards against.
        changes: pairs of a piece of source, which stands exactly once in one file of `tasks/lua/`, and what takes its
            place.
        tests: claims of the ledger's tests, each of which fails without the fence.
        walk: the random walk of the ledger machine finds it too.
    """

    name: str
    why: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[Claim, ...]
    walk: bool = False

    def scripts(self) -> ChangedScripts:
        """The scripts without the fence. Raises ValueError where a piece of source does not stand exactly once."""
        sources = {name: script_text(name) for name in SCRIPTS}
        files = {path.name: path.read_text() for path in LUA.glob("*.lua")}
        for old, new in self.changes:
            places = [name for name, source in files.items() for _ in range(source.count(old))]
            if len(places) != 1:
                raise ValueError(f"{self.name}: {old!r} stands in {places or 'no file'}, not exactly once")
            files[places[0]] = files[places[0]].replace(old, new)
            for name, source in sources.items():
                sources[name] = source.replace(old, new)
        return ChangedScripts(sources)


def one(old: str, new: str = "") -> tuple[tuple[str, str], ...]:
    """A single change: `old` is taken out, or gives way to `new`."""
    return ((old, new),)
