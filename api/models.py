"""Which models and workers there are, as Redis knows it, at most a second old, and which of them a request goes to."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import redis.asyncio

from api.caller import Caller
from tasks import keys
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo, WorkerInfo, choose_model, list_workers_async, parse_models
from tasks.settings import Settings

_FRESH_S: Final = 1.0
_SHOWN: Final = 128
#: Settings by which somebody has said what a request gets that names no model.
_NAMES_DEFAULT: Final = frozenset({"default_model", "served_model_name", "model"})


@dataclass(frozen=True, slots=True)
class Pool:
    """A model with those who serve it.

    Attributes:
        waiting: jobs that wait for a slot.
    """

    alias: str
    workers: Sequence[WorkerInfo]
    waiting: int

    @property
    def state(self) -> str:
        """ready: a worker of it can take jobs; loading: one will; draining: all are on their way out; no worker."""
        if any(worker.state == "ready" for worker in self.workers):
            return "ready"
        if any(worker.serves for worker in self.workers):
            return "loading"
        return "draining" if self.workers else "no worker"


class Models:
    """Chooses the model of a request.

    Attributes:
        aliases: further names of models, by the settings.
    """

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        self._client = client
        self.aliases = settings.aliases
        self._default = settings.default_model or settings.pool
        self._default_is_named = bool(_NAMES_DEFAULT & settings.model_fields_set)
        self._refuses = settings.without_worker == "refuse"
        self._models: dict[str, ModelInfo] = {}
        self._models_at = -_FRESH_S
        self._workers: list[WorkerInfo] = []
        self._workers_at = -_FRESH_S

    async def known(self, *, fresh: bool = False) -> dict[str, ModelInfo]:
        """Every model that was ever served, by its alias; with `fresh`, as it is now."""
        now = asyncio.get_running_loop().time()
        if fresh or now - self._models_at >= _FRESH_S:
            self._models = parse_models(await self._client.hgetall(keys.MODELS))
            self._models_at = now
        return self._models

    async def workers(self, *, fresh: bool = False) -> list[WorkerInfo]:
        """The workers that live; with `fresh`, as it is now."""
        now = asyncio.get_running_loop().time()
        if fresh or now - self._workers_at >= _FRESH_S:
            self._workers = await list_workers_async(self._client)
            self._workers_at = now
        return self._workers

    async def pools(self) -> list[Pool]:
        """Every model that has a worker, or jobs that wait for one, by alias."""
        workers = await self.workers()
        aliases = sorted({*await self.known(), *(worker.pool for worker in workers)})
        async with self._client.pipeline(transaction=False) as pipeline:
            for alias in aliases:
                pipeline.zcard(keys.wait(alias))
            waiting = await pipeline.execute()
        pools = [
            Pool(alias, [worker for worker in workers if worker.pool == alias], int(num_waiting))
            for alias, num_waiting in zip(aliases, waiting, strict=True)
        ]
        return [pool for pool in pools if pool.workers or pool.waiting]

    async def alive(self, *, fresh: bool = False) -> set[str]:
        """The models that a living worker serves, or will as soon as it has loaded them."""
        return {worker.pool for worker in await self.workers(fresh=fresh) if worker.serves}

    async def served(self, caller: Caller) -> dict[str, ModelInfo]:
        """What is alive now and the caller's to use, by every name that a request may give it: its own, and the aliases
        of the settings.
        """
        known, alive, allowed = await self.known(fresh=True), await self.alive(fresh=True), self.allowed(caller)
        found = {name: known[name] for name in sorted(alive) if name in known and (allowed is None or name in allowed)}
        for alias, name in self.aliases.items():
            if name in found and alias not in known:
                found[alias] = found[name]
        return found

    async def find(self, name: str) -> str | None:
        """The alias that is meant by a name of a model: itself, or what the settings say; None for an unknown one."""
        for fresh in (False, True):  # what is not known may have come within this second
            known = await self.known(fresh=fresh)
            # a model that is served under a name of its own wins over what the settings make of that name
            alias = name if name in known else self.aliases.get(name, name)
            named = self._default if self._default_is_named or not known else None
            if alias in known or alias == named:
                return alias
        return None

    def allowed(self, caller: Caller) -> frozenset[str] | None:
        """The models that a caller may use, by the names that they are served under; None: all."""
        if caller.key is None or not caller.key.models:
            return None
        return frozenset(name if name in self._models else self.aliases.get(name, name) for name in caller.key.models)

    async def choose(self, asked: str | None, caller: Caller) -> tuple[str, ModelInfo | None]:
        """The alias that a request goes to, and what is known of it. What the caller may not use is not there.

        Raises:
            CarpoolError: "model_not_found".
        """
        known, alive, default = await self.known(), await self.alive(), self._default
        allowed = self.allowed(caller)
        if asked is not None:
            alias = await self.find(asked)
            if alias is None or (allowed is not None and alias not in allowed):
                raise await self.unknown(asked, caller)
            return alias, (await self.known()).get(alias)
        if allowed is not None:
            known = {alias: model for alias, model in known.items() if alias in allowed}
            default = default if default in allowed else ""
        alias = choose_model(
            None, known.values(), default, is_named=self._default_is_named and bool(default), alive=alive
        )
        alias = alias or default
        if not alias:
            raise await self.unknown(asked, caller)
        return alias, known.get(alias)

    async def unknown(self, asked: str | None, caller: Caller) -> CarpoolError:
        """The error for a model that nobody has ever served, or that is none of the caller's."""
        allowed = self.allowed(caller)
        there = sorted(name for name in await self.known() if allowed is None or name in allowed)
        shown = ", ".join(there) or (self._default if allowed is None else "none yet")
        if not asked and allowed:
            names = ", ".join(sorted(allowed))[:_SHOWN]
            return CarpoolError(
                "model_not_found",
                f"this API key may use {names}, and no worker has ever served a model of such a name. Start one, or "
                "make a key for models that there are: carpool keys create --models",
                param="model",
            )
        what = (
            f"no worker has ever served the model {(asked or '')[:_SHOWN]!r}"
            if allowed is None
            else f"there is no model {(asked or '')[:_SHOWN]!r} for this API key"
        )
        return CarpoolError("model_not_found", f"{what}. There is: {shown}", param="model")

    async def check_worker(self, alias: str) -> None:
        """Refuse a model that nobody serves now, where the settings say so.

        Raises:
            CarpoolError: "no_worker".
        """
        if not self._refuses or alias in await self.alive() or alias in await self.alive(fresh=True):
            return
        raise CarpoolError(
            "no_worker",
            f"no worker serves the model {alias!r} now, and CARPOOL_WITHOUT_WORKER=refuse. {start_worker(alias)}, and "
            "try again; with CARPOOL_WITHOUT_WORKER=wait, jobs are accepted and wait for one",
            param="model",
            retry_after_s=10,
        )

    async def choose_vllm(self, asked: str | None, caller: Caller) -> tuple[str, ModelInfo | None]:
        """The same as `choose` among the models of live vLLM workers.

        Raises:
            CarpoolError: "no_worker", "model_not_found".
        """
        alias = None
        if asked is not None:
            alias = await self.find(asked)
            if alias is None:
                raise await self.unknown(asked, caller)
        pools = _vllm_pools(await self.workers()) or _vllm_pools(await self.workers(fresh=True))
        if not pools:
            raise CarpoolError(
                "no_worker",
                "/generate_vllm needs a worker with the vLLM engine, and none is up. Start one: "
                "carpool worker --engine vllm (in an environment with the extra carpool[vllm]); or use /generate",
                retry_after_s=10,
            )
        allowed = self.allowed(caller)
        if allowed is not None:
            pools = [pool for pool in pools if pool in allowed]
        if (alias is not None and alias not in pools) or not pools:
            raise CarpoolError(
                "model_not_found",
                f"no worker with the vLLM engine serves the model {(alias or '')[:_SHOWN]!r}. "
                f"There is: {', '.join(pools) or 'none'}",
                param="model",
            )
        alias = alias or (self._default if self._default in pools else pools[0])
        return alias, (await self.known()).get(alias)


def start_worker(alias: str) -> str:
    """Advice for a model without a worker."""
    return f"Start one: carpool worker --served-model-name {shlex.quote(alias)}"


def _vllm_pools(workers: Sequence[WorkerInfo]) -> list[str]:
    return sorted({worker.pool for worker in workers if worker.engine == "vllm" and worker.serves})
