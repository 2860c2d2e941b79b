"""What may happen next in the model of the protocol: workers, keeper, clients, time, and what breaks."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol_exploration import Edge
from tests.protocol_model import LIVE, MAX_ATTEMPTS, Call, Ride, Setting, State, Worker, execute, terminal


def steps(state: State, setting: Setting) -> Iterator[Edge]:
    """Every event that may follow, with the state that it leads to."""
    yield from _keeper(state, setting)
    for i in (0, 1):
        worker = state.workers[i]
        yield from _server(state, i, setting)
        yield from _child(state, i, setting)
        if worker.awake:
            yield from _worker(state, i, setting)
        else:
            yield f"w{i} wakes up", _with(state, i, worker._replace(awake=True))
    if state.late is not None:
        ledger, _ = execute(state, state.late, setting)
        yield "a late request is executed", state._replace(ledger=ledger, late=None)
    if state.faults < setting.faults:
        for name, following in _faults(state, setting):
            yield name, following._replace(faults=state.faults + 1)


def _with(state: State, i: int, worker: Worker) -> State:
    workers = (worker, state.workers[1]) if i == 0 else (state.workers[0], worker)
    return state._replace(workers=workers)


def _ride(worker: Worker) -> Ride:
    if worker.ride is None:
        raise ValueError("a worker without a ride")
    return worker.ride


# --- keeper, clients, time --------------------------------------------------------------------------------------------


def _keeper(state: State, setting: Setting) -> Iterator[Edge]:
    ledger = state.ledger
    if ledger.status == "queued" and state.messages == 0:
        yield "pump", state._replace(messages=1)
    if ledger.status == "running" and not ledger.leased and not state.in_grace:
        strikes = ledger.strikes + 1 if ledger.struck_at == ledger.k else 1
        if ledger.stop:
            yield "reaper ends it", state._replace(ledger=terminal(ledger, "cancelled", setting))
        elif ledger.boarded >= 0 and strikes >= MAX_ATTEMPTS:
            charged = ledger._replace(deaths=ledger.deaths + 1, strikes=strikes, struck_at=ledger.k, boarded=-1)
            yield "reaper charges it", state._replace(ledger=terminal(charged, "failed", setting))
        elif state.messages == 0:
            yield "reaper invites", state._replace(messages=1)
    if ledger.status == "running" and ledger.leased and not _is_kept(state):
        yield "lease runs out", _silent(state)
    if state.in_grace:
        yield "grace ends", state._replace(in_grace=False)
    if setting.cancels and not state.cancelled and ledger.status in LIVE:
        wanted = state._replace(cancelled=True)
        if ledger.status == "queued" or (not ledger.leased and not state.in_grace):
            yield "cancel", wanted._replace(ledger=terminal(ledger, "cancelled", setting))
        else:
            yield "cancel is asked for", wanted._replace(ledger=ledger._replace(stop=True))
    if setting.loses_tails and state.saved != ledger:
        yield "fsync", state._replace(saved=ledger)


def _is_kept(state: State) -> bool:
    """Whether a worker that is awake renews the lease."""
    return any(
        worker.awake and worker.ride is not None and worker.ride.nonce == state.ledger.owner for worker in state.workers
    )


def _silent(state: State) -> State:
    """The lease has run out. With the sequence in a child that counts as a death."""
    died = state.ledger.boarded >= 0
    return state._replace(ledger=state.ledger._replace(leased=False), real_deaths=state.real_deaths + died)


# --- one worker -------------------------------------------------------------------------------------------------------


def _server(state: State, i: int, setting: Setting) -> Iterator[Edge]:
    """The server executes the request that is on its way; the worker may be asleep."""
    worker = state.workers[i]
    if worker.call is not None and worker.answer is None:
        ledger, answer = execute(state, worker.call, setting)
        yield (
            f"w{i} {worker.call.name} executed",
            _with(state, i, worker._replace(answer=answer))._replace(ledger=ledger),
        )


def _child(state: State, i: int, setting: Setting) -> Iterator[Edge]:
    """The child computes, a few steps ahead of the ledger; it does not sleep with its parent."""
    worker = state.workers[i]
    ride = worker.ride
    if ride is None or ride.place not in ("boarded", "leaving"):
        return
    ahead = ride.held - ride.sent
    may_run = ahead < setting.run_ahead or "run-ahead" in setting.without
    if ride.place == "boarded" and ride.held < setting.tokens and may_run:
        if ride.held + 1 == setting.poison_at:
            dead = _with(state, i, worker._replace(ride=ride._replace(place="dead")))
            yield f"w{i} poison", dead._replace(real_deaths=state.real_deaths + 1)
        else:
            yield f"w{i} computes", _with(state, i, worker._replace(ride=ride._replace(held=ride.held + 1)))
    if worker.awake and worker.call is None:
        if ride.place == "boarded" and ride.held == setting.tokens:
            yield f"w{i} sequence ends", _with(state, i, worker._replace(ride=ride._replace(place="out")))
        elif ride.place == "leaving":
            yield f"w{i} child lets go", _with(state, i, worker._replace(ride=ride._replace(place="out")))


def _fresh_nonce(state: State) -> int:
    used = {state.ledger.owner, state.saved.owner if state.saved else 0, state.late.nonce if state.late else 0, 0}
    for worker in state.workers:
        used.add(worker.ride.nonce if worker.ride else 0)
        used.add(worker.call.nonce if worker.call else 0)
    return min(set(range(1, 9)) - used)


def _worker(state: State, i: int, setting: Setting) -> Iterator[Edge]:
    worker = state.workers[i]
    if worker.answer is not None:
        yield f"w{i} hears {worker.answer.verdict}", _hear(state, i)
        return
    if worker.call is not None:
        return
    ride = worker.ride
    if ride is None:
        if state.messages:
            asking = _with(state, i, worker._replace(ride=Ride(_fresh_nonce(state))))
            yield f"w{i} takes a message", asking._replace(messages=state.messages - 1)
        return
    for name, call in _calls(ride, setting):
        if call.name == "renew" and not _tells_something(state, ride):
            continue
        yield f"w{i} sends {name}", _with(state, i, worker._replace(call=call))


def _tells_something(state: State, ride: Ride) -> bool:
    """A renewal of a valid lease with nothing to tell changes nothing: those are left out."""
    ledger = state.ledger
    return ledger.stop or not ledger.leased or (ledger.owner, ledger.epoch) != (ride.nonce, ride.epoch)


def _calls(ride: Ride, setting: Setting) -> Iterator[tuple[str, Call]]:
    """What a worker in this position may send next."""
    mine = Call("step", ride.nonce, ride.epoch, first=ride.sent + 1)
    news = ride.held - ride.sent
    if ride.place == "claiming":
        yield "claim", Call("claim", ride.nonce, board=setting.claims_board)
    elif ride.place == "claimed":
        yield "board", mine._replace(board=True, num_tokens=news)
    elif ride.place in ("boarded", "leaving"):
        if news:
            yield "tokens", mine._replace(num_tokens=news)
        else:
            yield "renewal", Call("renew", ride.nonce, ride.epoch)
    elif ride.place == "dead":
        if news:
            yield "tokens", mine._replace(num_tokens=news)
        else:
            yield "death", Call("child_died", ride.nonce, ride.epoch, generation=ride.generation)
    elif ride.stopping:
        yield "stop", mine._replace(num_tokens=news, final="cancelled")
    elif ride.held == setting.tokens:
        yield "end", mine._replace(num_tokens=news, final="succeeded")
    elif news:
        yield "tokens", mine._replace(num_tokens=news)
    else:
        yield "release", Call("release", ride.nonce, ride.epoch)


def _hear(state: State, i: int) -> State:
    """The worker takes in an answer, as the Publisher does."""
    worker = state.workers[i]
    call, answer, ride = worker.call, worker.answer, _ride(worker)
    if call is None or answer is None:
        raise ValueError("no answer to hear")
    idle = worker._replace(call=None, answer=None)
    if call.name == "claim":
        if answer.verdict != "ok":
            return _with(state, i, idle._replace(ride=None))
        place = "out" if answer.stop else "boarded" if answer.boarded else "claimed"
        granted = Ride(ride.nonce, answer.epoch, answer.k, answer.k, place, stopping=answer.stop)
        return _with(state, i, idle._replace(ride=granted))
    if answer.verdict in ("fenced", "ended", "released") or answer.k > ride.held:
        return _with(state, i, idle._replace(ride=None))
    if call.name == "child_died":
        back = ride._replace(place="claimed", stopping=False, generation=ride.generation + 1)
        return _with(state, i, idle._replace(ride=back))
    if call.name == "step":
        ride = ride._replace(sent=answer.k)
    if call.board and answer.verdict == "ok" and not answer.stop:
        ride = ride._replace(place="boarded")
    elif answer.stop and not ride.stopping:
        place = {"boarded": "leaving", "leaving": "leaving", "dead": "dead"}.get(ride.place, "out")
        ends_itself = ride.place == "out" and not ride.handing_back
        ride = ride if ends_itself else ride._replace(place=place, stopping=True, handing_back=False)
    return _with(state, i, idle._replace(ride=ride))


# --- what breaks ------------------------------------------------------------------------------------------------------


def _faults(state: State, setting: Setting) -> Iterator[Edge]:
    kinds = setting.kinds
    if "message" in kinds and state.messages:
        yield "message lost", state._replace(messages=state.messages - 1)
        if state.messages == 1:
            yield "message doubled", state._replace(messages=2)
    if "outage" in kinds and state.ledger.status == "running" and state.ledger.leased:
        yield "outage", _silent(state)._replace(in_grace=True)
    if setting.loses_tails and state.saved is not None and state.saved != state.ledger:
        # the server was away, so that every lease looks run out
        yield "tail lost", _silent(state._replace(ledger=state.saved))._replace(in_grace=True)
    for i in (0, 1):
        yield from _faults_of(state, i, state.workers[i], kinds)


def _faults_of(state: State, i: int, worker: Worker, kinds: frozenset[str]) -> Iterator[Edge]:
    ride = worker.ride
    if "crash" in kinds and (ride is not None or worker.call is not None):
        # a new process takes its place; what was on its way may still reach the server
        late = worker.call if worker.call is not None and worker.answer is None else state.late
        yield f"w{i} dies", _with(state, i, Worker())
        if "late" in kinds and late is not state.late:
            yield f"w{i} dies, its request does not", _with(state, i, Worker())._replace(late=late)
    if "child" in kinds and ride is not None and ride.place in ("boarded", "leaving"):
        place = "out" if ride.place == "leaving" else "dead"
        dead = _with(state, i, worker._replace(ride=ride._replace(place=place)))
        yield f"w{i} child dies", dead._replace(real_deaths=state.real_deaths + 1)
    if "pause" in kinds and worker.awake and ride is not None:
        yield f"w{i} falls asleep", _with(state, i, worker._replace(awake=False))
    if "drain" in kinds and worker.awake and worker.call is None and ride is not None and ride.place == "boarded":
        leaving = ride._replace(place="leaving", handing_back=True)
        yield f"w{i} drains", _with(state, i, worker._replace(ride=leaving))
    if worker.call is not None and worker.answer is None:
        if "request" in kinds:
            yield f"w{i} request lost", _with(state, i, worker._replace(call=None))
        if "late" in kinds and state.late is None:
            yield f"w{i} gives up on a request", _with(state, i, worker._replace(call=None))._replace(late=worker.call)
    if worker.answer is not None and "reply" in kinds:
        yield f"w{i} reply lost", _with(state, i, worker._replace(call=None, answer=None))
