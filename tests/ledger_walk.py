"""A seeded random walk through the world of `tests/ledger_machine.py`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.ledger_machine import JOBS, World
from tests.ledger_workers import FAULTS


def walk(world: World, seed: int, steps: int) -> Counter[str]:
    """A seeded random walk through the world; returns how often each thing happened."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()

    def worker() -> int:
        return chance.randrange(2)

    def faults() -> tuple[str, ...]:
        return tuple(chance.choice(("", "", *FAULTS)) for _ in range(3)) if chance.random() < 0.4 else ()

    actions: list[tuple[int, str, Callable[[], None]]] = [
        (4, "accept", lambda: world.accept(chance.choice(JOBS), chance.random() < 0.3)),
        (2, "cancel", lambda: world.cancel(chance.choice(JOBS))),
        (5, "tick", world.tick),
        (12, "fetch", lambda: world.fetch(worker())),
        (24, "settle", lambda: world.settle(worker(), faults())),
        (18, "turn", lambda: world.turn(worker())),
        (6, "renew", lambda: world.renew(worker(), faults())),
        (4, "heartbeat", lambda: world.heartbeat(worker())),
        (6, "child starts", lambda: world.child_starts(worker())),
        (2, "child dies", lambda: world.child_dies(worker())),
        (1, "worker dies", lambda: world.worker_dies(worker())),
        (1, "pause", lambda: world.pause(worker())),
        (2, "stall", lambda: world.stall(worker(), chance.choice((9, 12)))),
        (4, "resume", lambda: world.resume(worker())),
        (2, "drain", lambda: world.drain(worker())),
        (1, "lose message", world.lose_message),
        (2, "double message", world.double_message),
        (2, "reconnect", lambda: world.reconnect(worker())),
        (2, "visibility runs out", world.visibility_runs_out),
        (6, "look for webhooks", lambda: world.look_for_webhooks(worker())),
        (12, "deliver", lambda: world.deliver(worker(), chance.random() < 0.3, faults())),
        (1, "deliverer dies", lambda: world.deliverer_dies(worker())),
        (2, "deliverer sleeps or wakes", lambda: world.deliverer_sleeps_or_wakes(worker())),
        (1, "lose webhook message", world.lose_webhook_message),
        (2, "double webhook message", world.double_webhook_message),
        (4, "advance", lambda: world.advance(chance.choice((1, 3, 10)))),
        (1, "outage", lambda: world.outage(chance.choice((5, 30)))),
        (2, "snapshot", world.take_snapshot),
        (1, "lost tail", world.lose_tail),
    ]
    weights = [weight for weight, _, _ in actions]
    for _ in range(steps):
        ((_, name, act),) = chance.choices(actions, weights)
        act()
        done[name] += 1
    world.finish()
    return done
