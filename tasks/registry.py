"""Who serves what: workers' heartbeats, the models that have ever been served, and the cards to count tokens with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import redis
import redis.asyncio

from tasks import keys
from tasks.chat_template import ChatTemplate
from tasks.redis_clients import write_even_when_full

CARD_TTL_S = 3600
#: A heartbeat counts for so many of its intervals.
HEARTBEATS_MISSED = 5
#: States of a worker that its pool can count on: it runs jobs, or will as soon as its model is loaded.
SERVING = frozenset({"loading", "ready", "restarting"})


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker, by its last heartbeat. What a worker of an older release does not say has the default here.

    Attributes:
        progress: fraction of a load, None where it is not known.
        pool: alias under which it serves its model.
        free: slots that are free.
        model: the model by its own name or place.
        dtype, context_length: "" and None until the model is loaded.
        version: of Carpool.
        tokens_per_s: how many it has written lately, of all its slots together.
    """

    incarnation: str
    name: str
    host: str
    pid: int
    child_pid: int | None
    state: str  # loading, ready, restarting, draining, broken
    phase: str
    progress: float | None
    pool: str
    engine: str
    device: str
    fingerprint: str
    slots: int
    free: int
    model: str = ""
    dtype: str = ""
    context_length: int | None = None
    version: str = ""
    tokens_per_s: float = 0.0

    @property
    def serves(self) -> bool:
        """Whether its pool can count on it: it is not on its way out."""
        return self.state in SERVING


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is or was served under an alias. `card` is the key of its tokenizer, "" before the first load."""

    alias: str
    model: str
    engine: str
    registered_at: float
    context_length: int | None = None
    card: str = ""
    fingerprint: str = ""


def worker_fields(worker: WorkerInfo) -> dict[str, str]:
    """A worker as the fields of its heartbeat."""
    return {
        name: "" if value is None else str(value) for name, value in asdict(worker).items() if name != "incarnation"
    }


def _worker(incarnation: str, raw: dict[str, str]) -> WorkerInfo:
    return WorkerInfo(
        incarnation=incarnation,
        name=raw["name"],
        host=raw["host"],
        pid=int(raw["pid"]),
        child_pid=int(raw["child_pid"]) if raw["child_pid"] else None,
        state=raw["state"],
        phase=raw["phase"],
        progress=float(raw["progress"]) if raw["progress"] else None,
        pool=raw["pool"],
        engine=raw["engine"],
        device=raw["device"],
        fingerprint=raw["fingerprint"],
        slots=int(raw["slots"]),
        free=int(raw["free"]),
        # what releases before this one do not say
        model=raw.get("model", ""),
        dtype=raw.get("dtype", ""),
        context_length=int(raw["context_length"]) if raw.get("context_length") else None,
        version=raw.get("version", ""),
        tokens_per_s=float(raw.get("tokens_per_s") or 0),
    )


def _texts(raw: Mapping[Any, Any]) -> dict[str, str]:
    """A hash as text; our clients decode, which redis-py's types do not know."""
    return {str(name): str(value) for name, value in raw.items()}


def _workers(incarnations: Iterable[str], found: Iterable[Mapping[Any, Any]]) -> list[WorkerInfo]:
    """Those of them that live, by name. A heartbeat that has run out may have left a field that a script wrote."""
    beats = ((id, _texts(raw)) for id, raw in zip(incarnations, found, strict=True))
    return sorted((_worker(id, raw) for id, raw in beats if "name" in raw and "free" in raw), key=lambda one: one.name)


def _incarnations(pools: Iterable[Iterable[Any]]) -> list[str]:
    return sorted({str(id) for members in pools for id in members})


def list_workers(client: redis.Redis) -> list[WorkerInfo]:
    """All workers whose heartbeat is alive, by name."""
    with client.pipeline(transaction=False) as pipeline:
        for alias in client.hkeys(keys.MODELS):
            pipeline.zrange(keys.pool_workers(str(alias)), 0, -1)
        incarnations = _incarnations(pipeline.execute())
        for id in incarnations:
            pipeline.hgetall(keys.worker(id))
        return _workers(incarnations, pipeline.execute())


async def list_workers_async(client: redis.asyncio.Redis) -> list[WorkerInfo]:
    """All workers whose heartbeat is alive, by name."""
    async with client.pipeline(transaction=False) as pipeline:
        for alias in await client.hkeys(keys.MODELS):
            pipeline.zrange(keys.pool_workers(str(alias)), 0, -1)
        incarnations = _incarnations(await pipeline.execute())
        for id in incarnations:
            pipeline.hgetall(keys.worker(id))
        return _workers(incarnations, await pipeline.execute())


def register_model(client: redis.Redis, model: ModelInfo) -> None:
    """Make an alias known, before its model is loaded; from then on jobs for it are accepted and wait."""
    write_even_when_full(client, "HSET", keys.MODELS, model.alias, json.dumps(asdict(model), separators=(",", ":")))


def parse_models(raw: Mapping[Any, Any]) -> dict[str, ModelInfo]:
    """The hash of models as it stands in Redis; what a newer release says besides is passed over."""
    known = {field.name for field in fields(ModelInfo)}
    return {
        alias: ModelInfo(**{name: said for name, said in json.loads(value).items() if name in known})
        for alias, value in _texts(raw).items()
    }


def publish_card(client: redis.Redis, tokenizer_json: str, chat_template: ChatTemplate) -> str:
    """Store what the API counts with; returns its key. Called again, it keeps it for another while."""
    card = json.dumps({"tokenizer": tokenizer_json, "chat_template": chat_template.to_json()}, ensure_ascii=False)
    digest = hashlib.sha256(card.encode()).hexdigest()[:24]
    if not client.expire(keys.card(digest), CARD_TTL_S):
        write_even_when_full(client, "SET", keys.card(digest), card, "EX", CARD_TTL_S)
    return digest


def keep_card(client: redis.Redis, digest: str) -> None:
    """A worker that uses the card lives."""
    client.expire(keys.card(digest), CARD_TTL_S)


def choose_model(
    asked: str | None,
    known: Iterable[ModelInfo],
    default: str,
    *,
    is_named: bool = False,
    alive: Collection[str] = (),
) -> str | None:
    """The alias that a request goes to; None where it asks for one that nobody has ever served.

    A request that names none gets `default`, if that is named or served; else the one of the living that was registered
    last; else what of these was served once.

    Args:
        is_named: somebody has chosen `default`: it counts as known before its first worker has come.
        alive: aliases that are served now.
    """
    models = {model.alias: model for model in known}
    is_known = default in models or is_named or not models
    if asked is not None:
        return asked if asked in models or (asked == default and is_known) else None
    living = [models[alias] for alias in alive if alias in models]
    if is_named or default in alive or (is_known and not living):
        return default
    return max(living or models.values(), key=lambda model: model.registered_at).alias
