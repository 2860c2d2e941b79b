"""`/metrics`, for Prometheus: what the ledger says of all models, and what this process has done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Self

import structlog
from fastapi import APIRouter, Request
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from redis.exceptions import RedisError
from starlette.responses import Response

from api.http_counts import HttpCounts
from api.metric_families import ledger_families
from api.service import Service
from tasks.codes import CODES
from tasks.ledger import SyncLedger
from tasks.metric_calls import TALLY_PAGE, MetricCalls, PoolNumbers
from tasks.redis_clients import connect
from tasks.settings import Settings
from tasks.version import carpool_version

_log = structlog.get_logger("carpool.metrics")
PATH: Final = "/metrics"
#: Many scrapers ask Redis once.
_FRESH_S: Final = 1.0
#: The keepers sum up what has happened; what they have left is done here, up to so many pages.
_MOST_PAGES: Final = 10

router = APIRouter(tags=["metrics"])


class LedgerNumbers:
    """What the ledger says of every pool, at most a second old.

    It is read in a thread, with a connection of its own: thousands of numbers are taken apart there, and neither
    requests nor streams wait for it.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = connect(settings)
        self._ledger = SyncLedger(self._client, settings)
        self._calls = MetricCalls(settings)
        self._bound_s = settings.redis_timeout_s
        self._found: list[PoolNumbers] | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[None] | None = None

    async def now(self) -> Sequence[PoolNumbers] | None:
        """None while Redis does not answer, which is known within `redis_timeout_s`."""
        if not self._is_fresh():
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(), name="carpool-metrics")
            # a late answer is for the next scrape
            answered, _ = await asyncio.wait({self._reading}, timeout=self._bound_s)
            if not answered:
                return None
        return self._found

    async def close(self) -> None:
        """Bounded by the Redis timeout."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=4 * self._bound_s)
        self._client.close()

    def _is_fresh(self) -> bool:
        return self._found is not None and asyncio.get_running_loop().time() - self._read_at < _FRESH_S

    async def _read(self) -> None:
        self._found = await asyncio.to_thread(self._ask)
        self._read_at = asyncio.get_running_loop().time()

    def _ask(self) -> list[PoolNumbers] | None:
        try:
            for _ in range(_MOST_PAGES):
                if self._ledger.run(self._calls.tally()) < TALLY_PAGE:
                    break
            return self._ledger.run(self._calls.gauges())
        except RedisError as error:
            _log.debug("metrics_without_redis", error=str(error))
            return None


class Metrics:
    """Answers scrapes.

    Args:
        counts: what was answered over HTTP.
    """

    def __init__(self, service: Service, counts: HttpCounts) -> None:
        self._service = service
        self._counts = counts
        self._ledger = LedgerNumbers(service.settings)
        self._process = ProcessCollector(registry=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ledger.close()

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the scraper would have."""
        pools = await self._ledger.now()
        own = list(self._own(redis_is_up=pools is not None))
        encode, content_type = choose_encoder(accept)
        # text for many models takes longer than a stream may wait
        return await asyncio.to_thread(lambda: encode(_Found(own, pools, self._service.settings))), content_type

    def _own(self, *, redis_is_up: bool) -> Iterator[Metric]:
        yield InfoMetricFamily("carpool_build", "The release of this process.", value={"version": carpool_version()})
        yield GaugeMetricFamily("carpool_redis_up", "Whether Redis answers this process.", value=float(redis_is_up))
        yield GaugeMetricFamily(
            "carpool_stream_clients", "Streams that are open in this process.", value=self._service.num_streams
        )
        yield CounterMetricFamily(
            "carpool_stream_resumes", "Streams that were taken up again in mid-text.", value=self._service.num_resumes
        )
        refusals = CounterMetricFamily("carpool_refusals", "Requests without a job, by error code.", labels=["code"])
        for code in CODES:
            refusals.add_metric([code], self._counts.refusals[code])
        yield refusals
        yield _requests(self._counts.requests)
        yield from self._process.collect()


def _requests(counted: Mapping[tuple[str, str, int], int]) -> Metric:
    family = CounterMetricFamily(
        "carpool_http_requests", "Requests whose answers have begun.", labels=["method", "endpoint", "status"]
    )
    for (method, endpoint, status), number in sorted(counted.items()):
        family.add_metric([method, endpoint, str(status)], number)
    return family


class _Found(Collector):
    """What one scrape has found. Nothing is said of the ledger while Redis is away: zeros would be made up."""

    def __init__(self, own: Iterable[Metric], pools: Sequence[PoolNumbers] | None, settings: Settings) -> None:
        self._own = own
        self._pools = pools
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        yield from self._own
        if self._pools is not None:
            yield from ledger_families(self._pools, self._settings)


def metrics_of(request: Request) -> Metrics:
    """The metrics of the application that a request came to."""
    metrics = request.app.state.metrics
    if not isinstance(metrics, Metrics):
        raise TypeError("the application serves only within its lifespan")
    return metrics


@router.get(
    PATH,
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "As Prometheus reads it."}
    },
)
async def metrics(request: Request) -> Response:
    """What Prometheus scrapes: all models, and this process. It answers also while Redis is away."""
    body, content_type = await metrics_of(request).scrape(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
