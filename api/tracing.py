"""Spans of the API: one for each request, and one in it for each acceptance of a job, which goes on in its trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access import OPEN_PATHS, path_of
from tasks.ledger_types import Acceptance
from tasks.trace_context import trace_context
from tasks.tracing import Tracing

_SERVER_ERROR: Final = 500
_propagator = TraceContextTextMapPropagator()


class TraceRequests:
    """A server span for each request but those that ask for the server's health. It continues the caller's trace.

    OpenTelemetry's own middleware would wrap what sends the body, and so cost something with every token of a stream.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        token = context.attach(trace.set_span_in_context(span))
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            context.detach(token)
            _end(span, scope)

    def _begin(self, scope: Scope) -> Span:
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
        }
        if scope.get("server"):
            attributes["server.address"], attributes["server.port"] = scope["server"][0], scope["server"][1] or 0
        return self._tracing.tracer.start_span(
            str(scope["method"]),
            context=_propagator.extract(given, context.Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )


def _end(span: Span, scope: Scope) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    status = scope.get("state", {}).get("status")
    if status is not None:
        span.set_attribute("http.response.status_code", status)
        if status >= _SERVER_ERROR:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR)
    span.end()


@contextmanager
def accepting(tracing: Tracing, acceptance: Acceptance) -> Iterator[tuple[Acceptance, Span]]:
    """A span around an acceptance: gives what is to be accepted, as a part of that trace, and the span.

    Where the request is not traced the acceptance stays as it is.
    """
    if not trace.get_current_span().is_recording():
        yield acceptance, trace.INVALID_SPAN
        return
    attributes: dict[str, Any] = {
        "carpool.job.id": acceptance.id,
        "carpool.jobs": len(acceptance.jobs),
        "carpool.priority": acceptance.priority,
        "gen_ai.request.model": acceptance.pool,
    }
    with tracing.tracer.start_as_current_span(
        "accept", kind=SpanKind.PRODUCER, attributes=attributes, record_exception=False
    ) as span:
        headers: dict[str, str] = {}
        _propagator.inject(headers)
        yield replace(acceptance, trace=trace_context(headers["traceparent"], headers.get("tracestate", ""))), span
