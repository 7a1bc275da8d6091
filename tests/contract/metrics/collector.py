"""A collector of spans: what a server exports over OTLP, as it arrives."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc",
    reason="OpenTelemetry is not installed: pip install 'slipstream[otel]'",
)
PATIENCE = 20.0


class Collector(trace_service.TraceServiceServicer):  # type: ignore[misc]
    """Keeps every span, with its resource's attributes."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self._came = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """Called by grpc."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        with self._came:
            for group in request.resource_spans:
                self.resources.append(attributes(group.resource.attributes))
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            self._came.notify_all()
        return ExportTraceServiceResponse()

    def wait(self, count: int) -> list[Any]:
        """The spans, once there are so many."""
        until = time.monotonic() + PATIENCE
        with self._came:
            while len(self.spans) < count and time.monotonic() < until:
                self._came.wait(0.1)
            assert len(self.spans) == count, f"{len(self.spans)} spans of {count}"
            return list(self.spans)

    def close(self) -> None:
        """Hang up."""
        self._server.stop(0).wait()


def attributes(pairs: Any) -> dict[str, Any]:
    """Key-value pairs of OTLP as a dictionary."""
    return {each.key: _value(each.value) for each in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
