"""Who serves what: workers' heartbeats, the models that have ever been served, and the cards to count tokens with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker, by its last heartbeat. `progress` is the fraction of a load, None where it is not known."""

    incarnation: str
    name: str
    host: str
    pid: int
    child_pid: int | None
    state: str  # loading, ready, restarting, draining
    phase: str
    progress: float | None
    pool: str
    engine: str
    device: str
    fingerprint: str
    slots: int
    free: int


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
    )


def _texts(raw: Mapping[Any, Any]) -> dict[str, str]:
    """A hash as text; our clients decode, which redis-py's types do not know."""
    return {str(name): str(value) for name, value in raw.items()}


def _workers(found: dict[str, dict[str, str]]) -> list[WorkerInfo]:
    return sorted((_worker(id, raw) for id, raw in found.items() if "free" in raw), key=lambda worker: worker.name)


def list_workers(client: redis.Redis) -> list[WorkerInfo]:
    """All workers whose heartbeat is alive, by name."""
    incarnations: set[str] = set()
    for alias in client.hkeys(keys.MODELS):
        incarnations.update(str(id) for id in client.zrange(keys.pool_workers(str(alias)), 0, -1))
    return _workers({id: _texts(client.hgetall(keys.worker(id))) for id in incarnations})


async def list_workers_async(client: redis.asyncio.Redis) -> list[WorkerInfo]:
    """All workers whose heartbeat is alive, by name."""
    incarnations: set[str] = set()
    for alias in await client.hkeys(keys.MODELS):
        incarnations.update(str(id) for id in await client.zrange(keys.pool_workers(str(alias)), 0, -1))
    return _workers({id: _texts(await client.hgetall(keys.worker(id))) for id in incarnations})


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


def choose_model(asked: str | None, known: Iterable[ModelInfo], default: str) -> str | None:
    """The alias that a request goes to; None where it asks for one that nobody has ever served.

    A request that names none gets `default` if that is known or nothing is; else the one registered last.
    """
    models = {model.alias: model for model in known}
    if asked is not None:
        return asked if asked in models or asked == default else None
    if default in models or not models:
        return default
    return max(models.values(), key=lambda model: model.registered_at).alias
