"""Traces with OpenTelemetry, where they are asked for: spans leave through a thread of their own, as OTLP over HTTP.

Without the extra `otel`, or without an endpoint, nothing of OpenTelemetry is imported. Its own variables (OTEL_…) say
where spans go and which are sampled. The provider is ours alone: what else in the process makes spans is not touched.
"""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import structlog

from tasks.settings import Settings, SettingsError
from tasks.trace_context import headers_of
from tasks.version import carpool_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator

_log = structlog.get_logger("carpool.traces")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_INSTALL: Final = "pip install 'carpool[otel]'"
#: At its end a process waits so long for its last spans to leave.
FLUSH_S: Final = 3.0


class Tracing:
    """Makes the spans of one process.

    Attributes:
        tracer: OpenTelemetry's.
        preset: makes the next span of a thread have an id of our choice.
    """

    def __init__(self, provider: TracerProvider, preset: PresetIds) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("carpool", carpool_version())
        self.preset = preset

    def context_of(self, trace: str) -> Context:
        """The context of a job's trace; one without a span where there is none."""
        from opentelemetry.context import Context

        return self._propagator.extract(headers_of(trace), Context())

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Send what is left, for `timeout_s` at most: what a collector has not taken by then is lost."""
        flush = threading.Thread(target=self._provider.shutdown, name="carpool-traces-end", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            _log.warning("spans_left_behind", waited_s=timeout_s)


class PresetIds:
    """An id of a span that is told beforehand, for the thread that tells it."""

    def __init__(self) -> None:
        self._next = threading.local()

    def set(self, span_id: int) -> None:
        """The next span that this thread starts gets this id."""
        self._next.id = span_id

    def take(self) -> int | None:
        """The id that was set, once."""
        span_id: int | None = getattr(self._next, "id", None)
        self._next.id = None
        return span_id


def start_tracing(settings: Settings, role: str, name: str) -> Tracing | None:
    """What makes this process's spans; None where nobody asked for any.

    Args:
        role: api, worker or webhooks.
        name: which of them it is.

    Raises:
        SettingsError: CARPOOL_TRACES=on, and OpenTelemetry is not installed.
    """
    if not _is_wanted(settings):
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        missing = f"OpenTelemetry is not installed: {_INSTALL}"
        if settings.traces == "on":
            raise SettingsError(f"CARPOOL_TRACES=on, and {missing}")
        _log.warning("no_traces", cause=missing, or_else="CARPOOL_TRACES=off")
        return None
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        cause = f"spans are sent as http/protobuf alone, and OTEL_EXPORTER_OTLP_PROTOCOL={protocol}"
        if settings.traces == "on":
            raise SettingsError(f"CARPOOL_TRACES=on: {cause}. Name an endpoint that takes it, such as port 4318")
        _log.warning("no_traces", cause=cause, or_else="CARPOOL_TRACES=off")
        return None
    return _start(role, name)


def _is_wanted(settings: Settings) -> bool:
    if settings.traces == "off" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return settings.traces == "on" or any(map(os.environ.get, _ENDPOINTS))


def _start(role: str, name: str) -> Tracing:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource(
        {
            "service.name": "carpool",
            "service.version": carpool_version(),
            "service.instance.id": f"{name}-{os.getpid()}",
            "carpool.role": role,
        }
    )
    preset = PresetIds()
    # what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins
    provider = TracerProvider(
        resource=own.merge(OTELResourceDetector().detect()), id_generator=_id_generator(preset), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, preset)


def _id_generator(preset: PresetIds) -> IdGenerator:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Generator(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return preset.take() or super().generate_span_id()

    return Generator()
