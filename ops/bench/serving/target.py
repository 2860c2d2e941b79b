"""A server that is measured: where it is, what it is asked for, and what it says of itself before and after."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from ops.bench.http_body import BadAnswerError, Head
from ops.bench.http_wire import Address, CutError, WireConnection
from ops.bench.serving.events import JobReader, OpenAIReader, StreamReader
from ops.bench.serving.plan import Endpoint, Plan
from ops.bench.serving.workload import Request
from ops.errors import ExitCode, OperationError

CONNECT_S: Final = 10.0
_LOOK_S: Final = 30.0
#: What a request may fail with that is no fault of ours.
NETWORK_ERRORS: Final = (OSError, CutError, BadAnswerError)


@dataclass(slots=True)
class Target:
    """One side.

    Attributes:
        name: what the tables call it.
        model: None names none, which is the server's default.
        asks_usage: whether streams are asked for their usage; jobs tell it always.
    """

    url: str
    endpoint: Endpoint
    api_key: str = field(default="", repr=False)
    model: str | None = None
    asks_usage: bool = True
    name: str = field(init=False)
    address: Address = field(init=False)
    _version: str = field(init=False, default="/v1")
    _free: deque[WireConnection] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        """Raises OperationError for a URL that is none."""
        found = Address.of(self.url)
        self.address = Address(found.host, found.port, found.is_tls, found.base.removesuffix("/v1"))
        self.name = self.address.host_header + self.address.base

    @property
    def path(self) -> str:
        """Below the address's base."""
        if self.endpoint == "jobs":
            return "/jobs"
        return f"{self._version}/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "carpool-bench"}
        return {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers

    def body(self, request: Request, plan: Plan) -> bytes:
        """What a request is on the wire."""
        fields: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        fields |= {"max_tokens": request.max_tokens, "temperature": plan.temperature, "seed": request.seed}
        is_text = isinstance(request.prompt, str)
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}] if is_text else request.prompt
        else:
            fields["prompt" if is_text else "messages"] = request.prompt
        if self.endpoint != "jobs":
            fields["stream"] = True
            if self.asks_usage:
                fields["stream_options"] = {"include_usage": True}
        return json.dumps({**fields, **plan.body}).encode()

    def reader(self) -> StreamReader:
        return JobReader() if self.endpoint == "jobs" else OpenAIReader()

    async def connect(self) -> tuple[WireConnection, bool]:
        """A connection, and whether it was used before. Raises OSError."""
        while self._free:
            connection = self._free.pop()
            if connection.is_free:
                return connection, True
        try:
            async with asyncio.timeout(CONNECT_S):
                return await WireConnection.open(self.address), False
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from error

    def release(self, connection: WireConnection) -> None:
        """Keep a connection for the next request, or close it where it cannot be used again."""
        if connection.is_free:
            self._free.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    async def get(self, path: str) -> tuple[Head, bytes]:
        """Status and body, within 30 s. Raises one of NETWORK_ERRORS."""
        async with asyncio.timeout(_LOOK_S):
            connection, _ = await self.connect()
            try:
                exchange = connection.begin("GET", path, self.headers)
                head = await exchange.head()
                await exchange.end()
            finally:
                self.release(connection)
        return head, exchange.body

    async def look(self) -> None:
        """See that the server answers, where its endpoints are, and which model it has where none was named.

        Raises OperationError.
        """
        try:
            head, body = await self.get(f"{self._version}/models")
            if head.status == 404 and self.address.base and self.endpoint != "jobs":
                # some servers have their endpoints right below a base of their own
                unversioned, models = await self.get("/models")
                if unversioned.status == 200:
                    self._version, head, body = "", unversioned, models
            is_foreign = self.endpoint == "jobs" and (await self.get("/health/accepting"))[0].status == 404
        except NETWORK_ERRORS as error:
            raise OperationError(
                f"Nothing answers at {self.url} ({type(error).__name__}: {error})",
                "Start it with: carpool up; or name what runs with --url",
                ExitCode.NOT_RUNNING,
            ) from error
        if head.status in (401, 403):
            raise OperationError(
                f"{self.url} wants an API key, and answered {head.status} to "
                + ("the one that it was sent" if self.api_key else "a request without one"),
                "Set CARPOOL_API_KEY for --url, OPENAI_API_KEY for --against",
            )
        if is_foreign:
            raise OperationError(
                f"{self.url} has no /health/accepting, so it is no Carpool and has no /jobs",
                "Measure another server with --endpoint completions or chat",
            )
        if self.model is None and head.status == 200 and self.endpoint != "jobs":
            with suppress(ValueError, TypeError, KeyError, IndexError, RecursionError):
                self.model = str(json.loads(body)["data"][0]["id"])
