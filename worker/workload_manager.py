"""Workload manager: who waits, who rides. Pure state without I/O; only the engine's thread touches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tasks import entries
from tasks.chat import Message
from tasks.entries import TokenLogprob
from tasks.job_request import SamplingParams
from tasks.ledger_types import Claim, Rider, SlotWrite
from worker.messages import Add
from worker.ride_times import RideTimes


class RideState(Enum):
    """Where a ride is. Only BOARDED and LEAVING have their sequence in the child."""

    CLAIMED = "claimed"  # ours in the ledger, waits to board
    BOARDED = "boarded"  # the child has it
    LEAVING = "leaving"  # the child was asked to take it out
    ENDING = "ending"  # out of the child; the last writes are on their way to the ledger


@dataclass(frozen=True, slots=True)
class End:
    """How a ride ends: a final status for the ledger, or, with `status` "", a hand-back."""

    status: str
    finish_reason: str = ""
    tail: str = ""
    error: str = ""


HAND_BACK = End("")
#: A suspect that others went before so often has its turn.
_PASSED_OVER_MOST = 2


@dataclass(slots=True)
class Ride:
    """One job under one claim, in one slot.

    Attributes:
        ids, texts, lp: all tokens of the job, the text each released, and its logprobs where they are asked for, from
            the log and from this ride: what a lost tail of the ledger is sent again from.
        sent: tokens that the ledger holds, as far as we know.
        version: of the job's record, which its entries get too.
        leaving_for: why the child was asked to take it out: cancelled, expired, or "" for a hand-back.
        over_as: set once the ledger is done with this claim: the status that the job ended with under it, or "" where
            it is another's. Nothing more is written; the slot is free when the child has let go.
        boarded_at: tokens it had when it boarded last.
        passed_over: how often another went first because this one has strikes.
        claimed_at: tokens it had when it was claimed.
        trace: the trace that it is a part of, "" where it is not traced.
        tokens_at: when the child gave us its last tokens in this ride, monotonic; None: none yet.
    """

    id: str
    epoch: int
    nonce: str
    params: SamplingParams
    seed: int
    prompt: str | None
    messages: tuple[Message, ...] | None
    tokens_are_default: bool
    sent: int
    version: int = entries.VERSION
    strikes: int = 0
    struck_at: int = -1
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    lp: list[TokenLogprob] = field(default_factory=list)
    state: RideState = RideState.CLAIMED
    end: End | None = None
    leaving_for: str = ""
    over_as: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    prompt_tokens_sent: bool = False
    passed_over: int = 0
    errors: int = 0
    boarded_at: int = -1
    claimed_at: int = 0
    trace: str = ""
    times: RideTimes = field(default_factory=RideTimes)
    tokens_at: float | None = None

    @classmethod
    def from_claim(cls, id: str, nonce: str, claim: Claim) -> Ride:
        """A ride at the position where the claim found the job; its tokens so far are read from the log."""
        messages = claim.input.get("messages")
        return cls(
            id=id,
            epoch=claim.epoch,
            nonce=nonce,
            params=SamplingParams(**_known(claim.params)),
            seed=claim.seed,
            prompt=claim.input.get("prompt"),
            messages=tuple(map(Message.from_record, messages)) if messages else None,
            tokens_are_default=claim.tokens_are_default,
            sent=claim.k,
            version=claim.version,
            strikes=claim.strikes,
            struck_at=claim.struck_at,
            claimed_at=claim.k,
            trace=claim.trace,
        )

    @property
    def rider(self) -> Rider:
        return Rider(self.id, self.epoch, self.nonce)

    @property
    def in_child(self) -> bool:
        return self.state in (RideState.BOARDED, RideState.LEAVING)

    def is_suspect(self, run_ahead: int) -> bool:
        """A process died with this job near the position where it is."""
        return self.strikes > 0 and self.sent <= self.struck_at + run_ahead

    @property
    def boarded_without_token(self) -> bool:
        """It boarded, and the ledger has not seen it move since."""
        return self.in_child and self.sent == self.boarded_at

    @property
    def wants_hand_back(self) -> bool:
        """It is out of the child and goes to another worker."""
        return self.state is RideState.ENDING and self.end is HAND_BACK and self.over_as is None

    def boarded(self) -> None:
        """The child gets it."""
        self.state = RideState.BOARDED
        self.boarded_at = self.sent
        self.passed_over = 0
        self.times.boarded(self.sent)

    def leave(self, why: str) -> None:
        """The child was asked to take it out; `why` is a final status, or "" for a hand-back."""
        self.state = RideState.LEAVING
        self.leaving_for = why
        if why:
            self.times.stop_asked()

    def out_of_child(self, end: End) -> None:
        """The child no longer has it; what is left is to write its end."""
        self.state = RideState.ENDING
        self.end = end
        self.times.out_of_child()

    def left(self, tail: str = "") -> None:
        """The child has taken it out, as asked."""
        self.out_of_child(End(self.leaving_for, self.leaving_for, tail) if self.leaving_for else HAND_BACK)

    def has_news(self) -> bool:
        """Whether the ledger does not hold everything yet."""
        return self.over_as is None and (
            len(self.ids) > self.sent
            or (self.end is not None and self.end is not HAND_BACK)
            or (self.prompt_tokens is not None and not self.prompt_tokens_sent)
        )

    def write(self, board: bool = False) -> SlotWrite:
        """What the ledger does not hold yet."""
        end = self.end or HAND_BACK
        return SlotWrite(
            self.id,
            self.epoch,
            self.nonce,
            first=self.sent + 1,
            ids=tuple(self.ids[self.sent :]),
            texts=tuple(self.texts[self.sent :]),
            lp=tuple(self.lp[self.sent :]),
            board=board,
            prompt_tokens=None if self.prompt_tokens_sent else self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            final=end.status,
            finish_reason=end.finish_reason,
            tail=end.tail,
            error=end.error,
            version=self.version,
        )

    def add_command(self) -> Add:
        """The command that puts this sequence into the child, at its position."""
        return Add(
            id=self.id,
            prompt=self.prompt,
            messages=self.messages,
            params=self.params,
            seed=self.seed,
            ids=tuple(self.ids),
            max_tokens_is_default=self.tokens_are_default,
        )


def _known(params: dict[str, Any]) -> dict[str, Any]:
    """What a newer API recorded besides was not asked for, or the claim would not have been granted."""
    return {name: value for name, value in params.items() if name in SamplingParams.model_fields}


class WorkloadManager:
    """The slots of this worker and the rides in them."""

    def __init__(self, num_slots: int, run_ahead: int) -> None:
        self.num_slots = num_slots
        self._run_ahead = run_ahead
        self._rides: dict[str, Ride] = {}

    def __len__(self) -> int:
        return len(self._rides)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._rides)

    @property
    def rides(self) -> tuple[Ride, ...]:
        return tuple(self._rides.values())

    @property
    def has_suspects(self) -> bool:
        """A process died with one of the rides near where it is: boarding goes one at a time."""
        return any(self._suspicious(ride) for ride in self._rides.values())

    def get(self, id: str) -> Ride | None:
        return self._rides.get(id)

    def add(self, ride: Ride) -> None:
        """Give a claimed job a slot. Raises ValueError where there is none: claims are made into free slots only."""
        if self.num_free <= 0 or ride.id in self._rides:
            raise ValueError(f"no free slot for {ride.id}: {len(self._rides)} of {self.num_slots} ride")
        self._rides[ride.id] = ride

    def remove(self, id: str) -> Ride:
        """Free a slot."""
        for ride in self._rides.values():
            if ride.state is RideState.CLAIMED and ride.is_suspect(self._run_ahead):
                ride.passed_over += 1
        return self._rides.pop(id)

    def next_to_board(self) -> list[Ride]:
        """The claimed rides that may board now.

        Jobs that a process died with board one at a time: at most one young sequence is in the child while one of
        the young, or the one to board, has strikes. So the next death has one suspect. Fewest strikes first, but a
        suspect that was passed over twice goes before those without, who then wait until it could board.
        """
        claimed = [ride for ride in self._rides.values() if ride.state is RideState.CLAIMED]
        claimed.sort(key=lambda ride: (ride.passed_over < _PASSED_OVER_MOST, ride.strikes))
        young = [ride for ride in self._rides.values() if ride.in_child and self._is_young(ride)]
        boarding: list[Ride] = []
        for ride in claimed:
            beside = young + boarding
            if beside and (self._suspicious(ride) or any(self._suspicious(other) for other in beside)):
                if ride.passed_over >= _PASSED_OVER_MOST:
                    break
                continue
            boarding.append(ride)
        return boarding

    def _is_young(self, ride: Ride) -> bool:
        return ride.boarded_without_token or self._suspicious(ride)

    def _suspicious(self, ride: Ride) -> bool:
        return ride.is_suspect(self._run_ahead)
