"""The API as an ASGI application: `create_app`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api import admission, error_docs, errors, generation, health, jobs, metrics, scene, static_page
from api.access import OPEN_PATHS, Access
from api.batches.runner import BatchRunner
from api.http_counts import HttpCounts
from api.openai import batches as batch_endpoints
from api.openai import chat, completions, files, models, responses
from api.rate_headers import RATE_HEADERS
from api.safety import BodyCheck, RequestIds
from api.service import Service
from tasks.api_key_terms import read_key_file
from tasks.process_name import process_name
from tasks.settings import Settings, load_settings
from tasks.tracing import start_tracing

_DESCRIPTION = """LLM generation on Celery and Redis.

An accepted job is never lost, and a stream outlives both of its ends: the client's and the worker's.

Errors are `{"error": {"message", "type", "param", "code"}}`. Every answer to a request that made a job carries
`x-carpool-job-id` and `Location`; any stream can be taken up again at `/jobs/{id}/stream`.

Where there are API keys, every request needs one (`Authorization: Bearer …`), and sees what was made with it alone."""


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The description; FastAPI would give every path a 422, which is 400 under `/v1`."""
        described = super().openapi()
        error_docs.describe(described)
        for path, operations in described["paths"].items():
            if path.startswith("/v1/"):
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        described["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        for path, operations in described["paths"].items():
            for operation in operations.values():
                # without keys nothing is asked for
                operation["security"] = [] if path in OPEN_PATHS else [{"api_key": []}, {}]
        return described


def create_app(settings: Settings | None = None) -> FastAPI:
    """An application for these settings; without any, for those of the environment.

    Its parts (clients of Redis, the relay, the keeper of the ledger) live as long as its lifespan.

    Raises:
        SettingsError: a setting cannot be used, or what CARPOOL_API_KEYS_FILE holds; or traces that cannot be had.
    """
    used = settings or load_settings()
    listed_keys = read_key_file(Path(used.api_keys_file).expanduser(), time.time()) if used.api_keys_file else ()
    tracing = start_tracing(used, "api", process_name("api"))

    counts = HttpCounts()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with (
                Service(used, listed_keys, tracing) as service,
                BatchRunner(service) as batches,
                metrics.Metrics(service, counts) as app.state.metrics,
            ):
                app.state.service = service
                app.state.batches = batches
                yield
        finally:
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = _Application(
        title="Carpool",
        version=version("carpool"),
        description=_DESCRIPTION,
        redoc_url=None,
        lifespan=lifespan,
    )
    errors.install(app)
    for part in (
        generation,
        jobs,
        completions,
        chat,
        responses,
        files,
        batch_endpoints,
        models,
        scene,
        health,
        metrics,
        static_page,
    ):
        app.include_router(part.router)
    # the last one added is the first to see a request
    app.add_middleware(admission.QueueHeaders)
    origins = _names(used.cors_origins)
    app.add_middleware(
        BodyCheck, max_bytes=used.max_body_bytes, uploads={files.PATH: used.max_file_bytes}, origins=origins
    )
    app.add_middleware(Access, allowed_hosts=_names(used.allowed_hosts), any_host=used.allow_no_keys)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client in a page sends headers of its own; the origins are what is checked
            expose_headers=["Location", "Retry-After", "x-carpool-job-id", "x-request-id", *RATE_HEADERS],
        )
    app.add_middleware(RequestIds, root_path=used.root_path, on_start=counts.note)
    if tracing is not None:
        from api.tracing import TraceRequests

        app.add_middleware(TraceRequests, tracing=tracing)
    return app


def _names(setting: str) -> list[str]:
    return [name.strip() for name in setting.split(",") if name.strip()]
