"""Every state of the model of the protocol that a bounded number of faults can lead to: what must be true in each.

`explore` checks each state, and then that from each of them the job still comes to an end when nothing more breaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tests.protocol_model import END, LIVE, MAX_ATTEMPTS, Ledger, Setting, State, Worker


class Violation(Exception):
    """A state that must not be, with the way that leads to it."""


Edge = tuple[str, State]
Steps = Callable[[State, Setting], Iterator[Edge]]


def check(state: State, setting: Setting) -> str:
    """What is wrong with a state, "" where nothing is."""
    ledger = state.ledger
    if ledger.intruded:
        return "somebody else than the owner has written"
    tokens = [one for one in ledger.log if one != END]
    if tokens != list(range(1, ledger.k + 1)):
        return f"the log holds the tokens {tokens}, k is {ledger.k}"
    ends = ledger.log.count(END)
    if ends != (ledger.status not in LIVE):
        return f"{ends} ends in a job that is {ledger.status}"
    if ledger.told != (ledger.status not in LIVE):
        return f"{'an event' if ledger.told else 'no event'} of a job that is {ledger.status}"
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
        ride = worker.ride
        # after a lost tail the ledger is behind, not the child ahead
        if ride is None or ride.place not in ("boarded", "leaving") or setting.loses_tails:
            continue
        if ride.held - ride.sent > setting.run_ahead:
            return "the child ran further ahead than it may"
    return ""


def canonical(state: State) -> State:
    """One of the states that differ only in which worker is which and in the names of nonces."""
    first, second = state.workers
    if _shape(first, state.ledger.owner) > _shape(second, state.ledger.owner):
        first, second = second, first
    names = {0: 0}
    for nonce in _nonces(state, first, second):
        names.setdefault(nonce, len(names))
    if all(nonce == name for nonce, name in names.items()) and first is state.workers[0]:
        return state
    saved, late = state.saved, state.late
    return state._replace(
        ledger=state.ledger._replace(owner=names[state.ledger.owner]),
        workers=(_renamed(first, names), _renamed(second, names)),
        late=late and late._replace(nonce=names[late.nonce]),
        saved=saved and saved._replace(owner=names[saved.owner]),
    )


def _shape(worker: Worker, owner: int) -> int:
    ride, call = worker.ride, worker.call
    return hash(
        (worker.awake, ride and (*ride[1:], ride.nonce == owner), call and (call.name, *call[2:]), worker.answer)
    )


def _nonces(state: State, *workers: Worker) -> Iterator[int]:
    yield state.ledger.owner
    for worker in workers:
        if worker.ride:
            yield worker.ride.nonce
    if state.late:
        yield state.late.nonce
    if state.saved:
        yield state.saved.owner


def _renamed(worker: Worker, names: dict[int, int]) -> Worker:
    ride, call = worker.ride, worker.call
    if ride is None:
        return worker
    return worker._replace(
        ride=ride._replace(nonce=names[ride.nonce]), call=call and call._replace(nonce=names[call.nonce])
    )


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
        for name, reached in steps(state, setting):
            following = canonical(reached)
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
