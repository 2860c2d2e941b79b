"""The protocol as an explicit-state model: one job, two workers, every order of events, any fault between two calls.

No Redis and no time: a script is one atomic function on the ledger, and what time does (a lease runs out, a mark grows
old) may happen whenever it could. This file holds the scripts, `tests/protocol_steps.py` what may happen next, and
`tests/protocol_exploration.py` visits every state.

What is modelled: claim, step, boarding, finish, renewal, release, child_died, cancel, reaper and pump; requests and
replies that are lost or executed after their client gave up; workers that die, or sleep and wake up; children that die
apart; a poison job; outages with their grace; lost tails; messages that are lost or doubled. Not modelled: groups,
deadlines, several jobs at once, other models. `without` takes fences away, to see that the model has teeth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_ATTEMPTS = 3
END = 0
LIVE = ("queued", "running")


class Ledger(NamedTuple):
    """The job's record and its log: numbers of tokens in the order in which they were written, `END` for the end.

    `intruded`: somebody else than the owner has written. `told`: the end's event is in the outbox of webhooks.
    """

    status: str = "queued"
    epoch: int = 0
    owner: int = 0
    leased: bool = False
    stop: bool = False
    k: int = 0
    boarded: int = -1
    strikes: int = 0
    struck_at: int = -1
    deaths: int = 0
    died_gen: int = 0
    log: tuple[int, ...] = ()
    intruded: bool = False
    told: bool = False


class Call(NamedTuple):
    """One call of a script: its name, the claim under which it is made, and what it carries."""

    name: str
    nonce: int
    epoch: int = 0
    first: int = 0
    num_tokens: int = 0
    board: bool = False
    final: str = ""
    generation: int = 0


class Answer(NamedTuple):
    verdict: str
    k: int = 0
    stop: bool = False
    epoch: int = 0
    boarded: bool = False


class Ride(NamedTuple):
    """A worker's ride. `held`: tokens that it has; `sent`: those that it believes to be in the ledger.

    `place`: claiming, claimed, boarded, leaving (the child was asked to let go), out (of the child), dead (the child
    died under it). `generation`: number of its child, counted within this claim.
    """

    nonce: int
    epoch: int = 0
    sent: int = 0
    held: int = 0
    place: str = "claiming"
    stopping: bool = False
    handing_back: bool = False
    generation: int = 1


class Worker(NamedTuple):
    """`call`: the request that is on its way or was executed; `answer`: the reply on its way."""

    awake: bool = True
    ride: Ride | None = None
    call: Call | None = None
    answer: Answer | None = None


class State(NamedTuple):
    """`late`: a request whose client gave up and that may still be executed. `saved`: what a lost tail goes back to."""

    ledger: Ledger = Ledger()
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    messages: int = 0
    late: Call | None = None
    saved: Ledger | None = None
    in_grace: bool = False
    cancelled: bool = False
    real_deaths: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What may happen in one exploration.

    `poison_at`: the token at which the job kills its child, 0: never. `claims_board`: a claim boards what nothing died
    with, as where no rider is under suspicion.
    """

    tokens: int = 2
    run_ahead: int = 1
    faults: int = 2
    poison_at: int = 0
    cancels: bool = False
    loses_tails: bool = False
    claims_board: bool = True
    kinds: frozenset[str] = frozenset(
        {"crash", "child", "pause", "drain", "request", "reply", "late", "message", "outage"}
    )
    without: frozenset[str] = frozenset()


# --- the scripts ------------------------------------------------------------------------------------------------------


def terminal(ledger: Ledger, status: str, setting: Setting) -> Ledger:
    if ledger.status not in LIVE:
        return ledger
    told = "outbox" not in setting.without
    return ledger._replace(status=status, epoch=ledger.epoch + 1, leased=False, log=(*ledger.log, END), told=told)


def _charge(ledger: Ledger, setting: Setting) -> Ledger:
    strikes = ledger.strikes + 1 if ledger.struck_at == ledger.k else 1
    ledger = ledger._replace(strikes=strikes, deaths=ledger.deaths + 1, struck_at=ledger.k, boarded=-1)
    return terminal(ledger, "failed", setting) if strikes >= MAX_ATTEMPTS else ledger


def _owned(ledger: Ledger, call: Call, setting: Setting) -> bool:
    return (
        (ledger.status == "running" or "owned status" in setting.without)
        and (ledger.epoch == call.epoch or "owned epoch" in setting.without)
        and (ledger.owner == call.nonce or "owned nonce" in setting.without)
    )


def _written_by(ledger: Ledger, call: Call) -> Ledger:
    owns = ledger.status == "running" and (ledger.owner, ledger.epoch) == (call.nonce, call.epoch)
    return ledger if owns else ledger._replace(intruded=True)


def _claim(ledger: Ledger, call: Call, in_grace: bool, setting: Setting) -> tuple[Ledger, Answer]:
    if ledger.status not in LIVE:
        return ledger, Answer("ended")
    if ledger.status == "running" and ledger.owner == call.nonce:
        return ledger, Answer("ok", ledger.k, ledger.stop, ledger.epoch, ledger.boarded >= 0)
    out = ledger.status == "running" and (not ledger.leased or "lease" in setting.without)
    if not (ledger.status == "queued" or (out and not in_grace)):
        return ledger, Answer("taken")
    if ledger.stop:
        return terminal(ledger, "cancelled", setting), Answer("ended")
    if ledger.status == "running" and ledger.boarded >= 0:
        ledger = _charge(ledger, setting)
        if ledger.status not in LIVE:
            return ledger, Answer("ended")
    boarded = ledger.k if call.board and not ledger.strikes else -1
    ledger = ledger._replace(
        status="running", epoch=ledger.epoch + 1, owner=call.nonce, leased=True, boarded=boarded, died_gen=0
    )
    return ledger, Answer("ok", ledger.k, False, ledger.epoch, boarded >= 0)


def _step(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        mine = ledger.owner == call.nonce and ledger.epoch == call.epoch + 1 and ledger.status not in LIVE
        return ledger, Answer("ended" if mine else "fenced", ledger.k)
    ledger = _written_by(ledger, call)._replace(leased=True)
    if call.first and call.first != ledger.k + 1 and "position" not in setting.without:
        return ledger, Answer("at", ledger.k, ledger.stop)
    if call.board:
        ledger = ledger._replace(boarded=ledger.k)
    written = tuple(range(call.first, call.first + call.num_tokens))
    ledger = ledger._replace(k=ledger.k + call.num_tokens, log=ledger.log + written)
    if call.final:
        return terminal(ledger, call.final, setting), Answer("ended", ledger.k)
    return ledger, Answer("ok", ledger.k, ledger.stop)


def _release(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        return ledger, Answer("fenced")
    ledger = _written_by(ledger, call)
    if ledger.stop:
        return terminal(ledger, "cancelled", setting), Answer("ended")
    owner = ledger.owner if "release owner" in setting.without else 0
    return ledger._replace(status="queued", owner=owner, leased=False, boarded=-1), Answer("released")


def _child_died(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        return ledger, Answer("fenced")
    told = (
        call.generation == ledger.died_gen
        if "died_gen order" in setting.without
        else call.generation <= ledger.died_gen
    )
    if told and "died_gen" not in setting.without:
        return ledger, Answer("back", ledger.k)
    ledger = _written_by(ledger, call)._replace(died_gen=call.generation)
    if ledger.boarded >= 0:
        ledger = _charge(ledger, setting)
    if ledger.status not in LIVE:
        return ledger, Answer("ended")
    return ledger._replace(boarded=-1), Answer("back", ledger.k)


def execute(state: State, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    """What the server does with a request."""
    match call.name:
        case "claim":
            return _claim(state.ledger, call, state.in_grace, setting)
        case "release":
            return _release(state.ledger, call, setting)
        case "child_died":
            return _child_died(state.ledger, call, setting)
        case _:
            return _step(state.ledger, call, setting)
