"""Which models and workers there are, as Redis knows it, at most a second old."""

from __future__ import annotations

import asyncio
from typing import Final

import redis.asyncio

from api.caller import Caller
from tasks import keys
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo, WorkerInfo, choose_model, list_workers_async, parse_models
from tasks.settings import Settings

_FRESH_S: Final = 1.0


class Models:
    """Chooses the model of a request.

    Attributes:
        aliases: further names of models, by the settings.
    """

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        self._client = client
        self.aliases = settings.aliases
        self._default = settings.default_model or settings.pool
        self._models: dict[str, ModelInfo] = {}
        self._models_at = -_FRESH_S
        self._workers: list[WorkerInfo] = []
        self._workers_at = -_FRESH_S

    async def known(self) -> dict[str, ModelInfo]:
        """Every model that was ever served, by its alias."""
        now = asyncio.get_running_loop().time()
        if now - self._models_at >= _FRESH_S:
            self._models = parse_models(await self._client.hgetall(keys.MODELS))
            self._models_at = now
        return self._models

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live."""
        now = asyncio.get_running_loop().time()
        if now - self._workers_at >= _FRESH_S:
            self._workers = await list_workers_async(self._client)
            self._workers_at = now
        return self._workers

    def allowed(self, caller: Caller) -> frozenset[str] | None:
        """The models that a caller may use, by the names that they are served under; None: all."""
        if caller.key is None or not caller.key.models:
            return None
        return frozenset(self.aliases.get(name, name) for name in caller.key.models)

    async def choose(self, asked: str | None, caller: Caller) -> tuple[str, ModelInfo | None]:
        """The alias that a request goes to, and what is known of it. What the caller may not use is not there.

        Raises:
            CarpoolError: "model_not_found".
        """
        models, default, allowed = await self.known(), self._default, self.allowed(caller)
        if asked is not None:
            asked = self.aliases.get(asked, asked)
        if allowed is not None:
            models = {alias: model for alias, model in models.items() if alias in allowed}
            default = default if default in allowed else ""
        alias = choose_model(asked, models.values(), default)
        if not alias:
            there = ", ".join(sorted(models)) or default or "none yet"
            if allowed is not None:
                raise CarpoolError(
                    "model_not_found",
                    f"there is no model {asked or ''!r} for this API key. There is: {there}",
                    param="model",
                )
            raise CarpoolError(
                "model_not_found", f"no worker has ever served the model {asked!r}. There is: {there}", param="model"
            )
        return alias, models.get(alias)

    async def choose_vllm(self, asked: str | None, caller: Caller) -> tuple[str, ModelInfo | None]:
        """The same among the models of live vLLM workers.

        Raises:
            CarpoolError: "no_worker", "model_not_found".
        """
        pools = sorted({worker.pool for worker in await self.workers() if worker.engine == "vllm"})
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
        if (asked is not None and asked not in pools) or not pools:
            raise CarpoolError(
                "model_not_found",
                f"no worker with the vLLM engine serves the model {asked!r}. There is: {', '.join(pools) or 'none'}",
                param="model",
            )
        alias = asked or (self._default if self._default in pools else pools[0])
        return alias, (await self.known()).get(alias)
