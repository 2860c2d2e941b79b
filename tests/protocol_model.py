"""The protocol as an explicit-state model: one job, two workers, every order of events and every fault between two calls.

No Redis and no time: a script is one atomic function on the ledger, and what time does (a lease runs out, a mark grows
old) may happen whenever it could. `explore` visits every state that is reachable with a bounded number of faults, checks
each, and then that from each of them the job still comes to an end when nothing more breaks.

What is modelled: claim, step, boarding, finish, renewal, release, child_died, cancel, reaper and pump; requests and
replies that are lost or executed after their client gave up; workers that die, or sleep and wake up; children that die
apart; a poison job; outages with their grace; lost tails; messages that are lost or doubled. Not modelled: groups,
deadlines, several jobs at once, other models. `without` takes fences away, to see that the model has teeth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_ATTEMPTS = 3
END = 0
LIVE = ("queued", "running")


class Ledger(NamedTuple):
    """The job's record and its log: numbers of tokens in the order in which they were written, `END` for the end."""

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


class Call(NamedTuple):
    """One call of a script: its name, the claim under which it is made, and what it carries."""

    name: str
    nonce: int
    epoch: int = 0
    first: int = 0
    count: int = 0
    board: bool = False
    final: str = ""
    generation: int = 0


class Answer(NamedTuple):
    verdict: str
    k: int = 0
    stop: bool = False
    epoch: int = 0


class Ride(NamedTuple):
    """A worker's ride. `held`: tokens that it has; `sent`: those that it believes to be in the ledger.

    `place`: claiming, claimed, boarded, leaving (the child was asked to let go), out (of the child), dead (the child died
    under it). `generation`: number of its child, counted within this claim.
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
    """`late`: a request whose client gave up and which may still be executed. `saved`: what a lost tail goes back to."""

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
    """What may happen in one exploration. `poison_at`: the token at which the job kills its child, 0 for none."""

    tokens: int = 2
    run_ahead: int = 1
    faults: int = 2
    poison_at: int = 0
    cancels: bool = False
    drains: bool = False
    loses_tails: bool = False
    kinds: frozenset[str] = frozenset({"crash", "child", "pause", "request", "reply", "late", "message", "outage"})
    without: frozenset[str] = frozenset()


class Violation(Exception):
    """A state that must not be, with the way that leads to it."""


# --- the scripts ------------------------------------------------------------------------------------------------------


def terminal(ledger: Ledger, status: str, setting: Setting) -> Ledger:
    if ledger.status not in LIVE and "terminal status" not in setting.without:
        return ledger
    return ledger._replace(status=status, epoch=ledger.epoch + 1, leased=False, log=(*ledger.log, END))


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


def _claim(ledger: Ledger, call: Call, in_grace: bool, setting: Setting) -> tuple[Ledger, Answer]:
    if ledger.status not in LIVE:
        return ledger, Answer("ended")
    if ledger.status == "running" and ledger.owner == call.nonce:
        return ledger, Answer("ok", ledger.k, ledger.stop, ledger.epoch)
    out = ledger.status == "running" and (not ledger.leased or "lease" in setting.without)
    if not (ledger.status == "queued" or (out and (not in_grace or "grace" in setting.without))):
        return ledger, Answer("taken")
    if ledger.stop:
        return terminal(ledger, "cancelled", setting), Answer("ended")
    if ledger.status == "running" and ledger.boarded >= 0:
        ledger = _charge(ledger, setting)
        if ledger.status not in LIVE:
            return ledger, Answer("ended")
    ledger = ledger._replace(
        status="running", epoch=ledger.epoch + 1, owner=call.nonce, leased=True, boarded=-1, died_gen=0
    )
    return ledger, Answer("ok", ledger.k, False, ledger.epoch)


def _step(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        mine = ledger.owner == call.nonce and ledger.epoch == call.epoch + 1 and ledger.status not in LIVE
        return ledger, Answer("ended" if mine else "fenced", ledger.k)
    ledger = ledger._replace(leased=True)
    if call.first and call.first != ledger.k + 1 and "position" not in setting.without:
        return ledger, Answer("at", ledger.k, ledger.stop)
    if call.board:
        ledger = ledger._replace(boarded=ledger.k)
    written = tuple(range(call.first, call.first + call.count))
    ledger = ledger._replace(k=ledger.k + call.count, log=ledger.log + written)
    if call.final:
        return terminal(ledger, call.final, setting), Answer("ended", ledger.k)
    return ledger, Answer("ok", ledger.k, ledger.stop)


def _release(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        return ledger, Answer("fenced")
    if ledger.stop:
        return terminal(ledger, "cancelled", setting), Answer("ended")
    owner = ledger.owner if "release owner" in setting.without else 0
    return ledger._replace(status="queued", owner=owner, leased=False, boarded=-1), Answer("released")


def _child_died(ledger: Ledger, call: Call, setting: Setting) -> tuple[Ledger, Answer]:
    if not _owned(ledger, call, setting):
        return ledger, Answer("fenced")
    if ledger.died_gen == call.generation and "died_gen" not in setting.without:
        return ledger, Answer("back", ledger.k)
    ledger = ledger._replace(died_gen=call.generation)
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


# --- exploration ------------------------------------------------------------------------------------------------------

Edge = tuple[str, State]
Steps = Callable[[State, Setting], Iterator[Edge]]


def check(state: State, setting: Setting) -> str:
    """What is wrong with a state, "" where nothing is."""
    ledger = state.ledger
    tokens = [one for one in ledger.log if one != END]
    if tokens != list(range(1, ledger.k + 1)):
        return f"the log holds the tokens {tokens}, k is {ledger.k}"
    ends = ledger.log.count(END)
    if ends != (ledger.status not in LIVE):
        return f"{ends} ends in a job that is {ledger.status}"
    if ends and ledger.log[-1] != END:
        return "a token after the end"
    if ledger.status in LIVE and ledger.strikes >= MAX_ATTEMPTS:
        return f"{ledger.strikes} strikes and still {ledger.status}"
    if ledger.deaths > state.real_deaths:
        return f"{ledger.deaths} deaths charged, {state.real_deaths} died"
    if ledger.status == "cancelled" and not state.cancelled:
        return "cancelled by nobody"
    if ledger.status == "succeeded" and ledger.k != setting.tokens:
        return f"succeeded with {ledger.k} tokens"
    for worker in state.workers:
        if worker.ride and worker.ride.place in ("boarded", "leaving"):
            # after a lost tail the ledger is behind, not the child ahead
            if worker.ride.held - worker.ride.sent > setting.run_ahead and not setting.loses_tails:
                return "the child ran further ahead than it may"
    return ""


def explore(setting: Setting, steps: Steps, most: int = 400_000) -> int:
    """Visit every state. Returns their number.

    Raises:
        Violation: with the shortest way to a state that is wrong, or from which the job cannot end any more.
    """
    start = State(saved=Ledger() if setting.loses_tails else None)
    came: dict[State, tuple[State | None, str]] = {start: (None, "accepted")}
    before: dict[State, list[State]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for name, following in steps(state, setting):
            if following.faults == state.faults:
                before.setdefault(following, []).append(state)
            if following in came:
                continue
            came[following] = (state, name)
            if wrong := check(following, setting):
                raise Violation(f"{wrong}: {_way(came, following)}")
            if len(came) > most:
                raise Violation(f"more than {most} states")
            queue.append(following)
    ending = {state for state in came if state.ledger.status not in LIVE}
    ended = deque(ending)
    while ended:
        for earlier in before.get(ended.popleft(), ()):
            if earlier not in ending:
                ending.add(earlier)
                ended.append(earlier)
    for state in came:
        if state not in ending:
            raise Violation(f"the job can never end: {_way(came, state)}")
    return len(came)


def _way(came: dict[State, tuple[State | None, str]], state: State) -> str:
    names: list[str] = []
    at: State | None = state
    while at is not None:
        at, name = came[at]
        names.append(name)
    return " > ".join(reversed(names))
