"""What happened to a job, as the ledger's scripts note it in its record: a line an event (tasks/lua/prelude.lua)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Events of a life. `omitted` stands where the middle of a long one was left out.
EVENTS: Final = frozenset({"claimed", "first_token", "died", "lost", "handed_back", "cancel_asked", "omitted"})


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """One event.

    Attributes:
        at_ms: by the clock of the Redis server, since 1970.
        tokens: that the log held then.
        cause: of a death.
        worker: who claimed it, or was lost.
        epoch: of a claim: it counts the rides from 1.
        invited_ms: of a claim: when the job was last invited; 0 where it was not.
        waited_ms: of a claim: for how long it had waited for one.
    """

    event: str
    at_ms: int
    tokens: int
    cause: str = ""
    worker: str = ""
    epoch: int = 0
    invited_ms: int = 0
    waited_ms: int = 0


def parse_life(text: str) -> list[LifeEvent]:
    """The events of a life, in their order. Lines of a newer release that this one does not know are passed over."""
    events = []
    for line in text.split("\n"):
        at, _, rest = line.partition(" ")
        event, _, rest = rest.partition(" ")
        tokens, _, detail = rest.partition(" ")
        if event not in EVENTS:
            continue
        match event:
            case "claimed":
                epoch, invited, waited, worker = detail.split(" ", 3)
                events.append(
                    LifeEvent(
                        event,
                        int(at),
                        int(tokens),
                        worker=worker,
                        epoch=int(epoch),
                        invited_ms=int(invited),
                        waited_ms=int(waited),
                    )
                )
            case "lost":
                events.append(LifeEvent(event, int(at), int(tokens), worker=detail))
            case _:
                events.append(LifeEvent(event, int(at), int(tokens), cause=detail))
    return events


def until_claim(life: str, epoch: int) -> list[LifeEvent]:
    """The events up to the claim of this epoch, which is the last of them.

    More may stand behind it where the claim was sent again. Raises ValueError where it is not there.
    """
    events = parse_life(life)
    for place in reversed(range(len(events))):
        if events[place].event == "claimed" and events[place].epoch == epoch:
            return events[: place + 1]
    raise ValueError(f"no claim of epoch {epoch} in {life!r}")
