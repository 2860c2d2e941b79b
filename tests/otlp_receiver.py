"""A collector for a test: a real HTTP server that takes OTLP, reads the protobuf and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.service import eventually


@dataclass(frozen=True)
class SpanSeen:
    """One span, as it came. Times are ns since 1970; ids are in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]
    is_error: bool
    trace_state: str


@dataclass
class OtlpReceiver:
    """Listens on the loopback address from its start to the end of its block.

    Attributes:
        hold: while it is not set, requests get no answer.
    """

    spans: list[SpanSeen] = field(default_factory=list)
    num_requests: int = 0
    hold: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self.hold.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.num_requests += 1
                receiver.hold.wait()
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        SpanSeen(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _attributes(span.attributes),
                            resource,
                            [(event.name, _attributes(event.attributes)) for event in span.events],
                            [link.span_id.hex() for link in span.links],
                            span.status.code == 2,
                            span.trace_state,
                        )
                    )

    def named(self, name: str, **attributes: Any) -> list[SpanSeen]:
        """Spans of this name, in the order of their start, with these attributes (`__` for a dot)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        found = [span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()]
        return sorted(found, key=lambda span: span.start_ns)

    def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until spans have come that make this true."""
        eventually(f"{what}; there are {sorted(span.name for span in self.spans)}", holds)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))
