"""What a worker says of itself and of its model: its pool's entry, the card to count with, its heartbeat's data."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import redis

from tasks import keys
from tasks.registry import ModelInfo, WorkerInfo, parse_models, publish_card, register_model
from tasks.settings import Settings
from tasks.version import carpool_version
from worker.messages import ModelCard, Phase

#: Time over which tokens per second are told, in seconds.
_WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Condition:
    """How a worker is at one moment. `state` is one of `WorkerInfo`'s, `num_free` counts free slots."""

    state: str
    phase: Phase
    child_pid: int | None
    num_free: int


class TokenRate:
    """Tokens per second over the last ten seconds. One thread notes tokens, another one asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = 0
        #: Times, and how many tokens there were by then; the first one is as old as the window or older.
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def note(self, num_tokens: int) -> None:
        self._total += num_tokens

    def per_s(self) -> float:
        now, total = self._clock(), self._total
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (total - before) / max(now - since, 1.0)


class Registration:
    """Registers a worker's pool and model, and describes the worker for its heartbeats.

    Attributes:
        card_key: of the tokenizer's card in Redis, "" before a model with one is loaded.
        rate: of the tokens that the worker writes.
    """

    def __init__(self, settings: Settings, incarnation: str, name: str) -> None:
        self.card_key = ""
        self.rate = TokenRate()
        self._settings = settings
        self._incarnation = incarnation
        self._name = name
        self._host = socket.gethostname()
        self._card: ModelCard | None = None

    @property
    def model(self) -> str:
        """The model's own name or place; the simulated engine has none but its own."""
        return "simulated" if self._settings.engine == "simulated" else self._settings.model

    def announce(self, client: redis.Redis) -> None:
        """Make the pool known before its model is loaded: from now on its jobs are accepted and wait.

        An entry of this very model stays: others may serve it, and the API counts with what it says.
        """
        pool, engine = self._settings.pool, self._settings.engine
        entry = client.hget(keys.MODELS, pool)
        known = parse_models({pool: entry}).get(pool) if entry is not None else None
        if known is None or (known.model, known.engine) != (self.model, engine):
            register_model(client, ModelInfo(pool, self.model, engine, registered_at=time.time()))

    def publish(self, client: redis.Redis, card: ModelCard) -> None:
        """Say what the loaded model is, and with which tokenizer the API counts."""
        if card.tokenizer_json:
            self.card_key = publish_card(client, card.tokenizer_json, card.chat_template)
        info = ModelInfo(
            self._settings.pool,
            self.model,
            card.engine,
            registered_at=time.time(),
            context_length=card.context_length,
            card=self.card_key,
            fingerprint=card.fingerprint,
        )
        register_model(client, info)

    def loaded(self, card: ModelCard) -> None:
        """From now on the worker is described with this model."""
        self._card = card

    def describe(self, now: Condition) -> WorkerInfo:
        """The worker as its heartbeat says it; by one thread."""
        card = self._card
        return WorkerInfo(
            incarnation=self._incarnation,
            name=self._name,
            host=self._host,
            pid=os.getpid(),
            child_pid=now.child_pid,
            state=now.state,
            phase=now.phase.name,
            progress=now.phase.fraction,
            pool=self._settings.pool,
            engine=self._settings.engine,
            device=card.device if card else self._settings.device,
            fingerprint=card.fingerprint if card else "",
            slots=self._settings.max_batch_size,
            free=now.num_free,
            model=self.model,
            dtype=card.dtype if card else "",
            context_length=card.context_length if card else None,
            version=carpool_version(),
            tokens_per_s=round(self.rate.per_s(), 1),
        )
