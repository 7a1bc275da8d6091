"""Spans of requests by OpenTelemetry, sent to a collector over OTLP. Imported only where an endpoint is given.

There is one span per call. It begins when the handler is entered and ends with the call's status; a token adds nothing
to it. Attributes are those of the conventions for gRPC and for GenAI servers. They hold no prompt and no output.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.types.io import Finished, GenerateRequest
from service.rpc.interceptors import Context, final_code
from service.tracing.request_span import current_span

OPERATIONS = {"Generate": "text_completion", "Embed": "embeddings", "Classify": "classify", "Score": "rerank"}
"""Methods with spans, each with the name of its operation: calls that take a while. Spans of health checks would hide
theirs. The conventions have no names for the last two."""

FLUSH_SECONDS = 3.0
"""Seconds that the exit of the process waits for the last spans to be sent."""
NANOS = 1_000_000_000
SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that make a server's span an error, by the conventions. The other codes are errors of the caller."""


class OtlpSpan:
    """`RequestSpan` over a span of OpenTelemetry."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._arrived = time.time_ns()
        found = span.get_span_context()
        self.trace_id = f"{found.trace_id:032x}" if found.trace_flags.sampled else ""

    def queued(self, request: GenerateRequest) -> None:
        """Add the request's settings to the span, and an event at the time at which it goes to the engine."""
        self._arrived = time.time_ns()
        sampling = request.sampling
        self._span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion" if request.chat is None else "chat",
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                **({} if sampling.max_tokens is None else {"gen_ai.request.max_tokens": sampling.max_tokens}),
            }
        )
        self._span.add_event("queue", timestamp=self._arrived)

    def finished(self, event: Finished) -> None:
        """Add events and token counts of one output. The engine measured times from the request's arrival there."""
        timing, usage = event.timing, event.usage
        index = {"index": event.index}
        if timing.queue < timing.total:
            self._event("prefill", timing.queue, {**index, "cached_tokens": usage.cached_tokens})
        if usage.completion_tokens:
            self._event("decode", timing.first_token, index)
        self._event("finish", timing.total, {**index, "reason": event.reason.value, "tokens": usage.completion_tokens})
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": (event.reason.value,),
                "gen_ai.server.time_to_first_token": timing.first_token,
            }
        )

    def _event(self, name: str, seconds: float, attributes: dict[str, Any]) -> None:
        self._span.add_event(name, attributes, self._arrived + int(seconds * NANOS))


class OtlpTracer:
    """Makes and exports the spans of one server. `model` is the served model's name, set once it is loaded."""

    def __init__(self, endpoint: str, version: str) -> None:
        self.model = ""
        named = Resource.create({SERVICE_VERSION: version})
        if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            named = named.merge(Resource({SERVICE_NAME: "slipstream"}))
        # `close` shuts it down instead: by itself it would do so at the exit of the process, which a collector that
        # hangs would then hold up.
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("slipstream", version)
        self._propagator = TraceContextTextMapPropagator()

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Run one call inside a span, which is a child of the caller's span if the metadata names one."""
        service, _, name = method.strip("/").rpartition("/")
        if name not in OPERATIONS:
            yield
            return
        metadata: Any = context.invocation_metadata()
        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": self.model,
            "gen_ai.operation.name": OPERATIONS[name],
        }
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{service}/{name}", parent, SpanKind.SERVER, attributes)
        current_span.set(OtlpSpan(span))
        try:
            yield
        except BaseException as error:
            _end(span, final_code(context, error))
            raise
        _end(span, final_code(context, None))

    def close(self) -> None:
        """Send the remaining spans on a thread, and wait FLUSH_SECONDS at most."""
        flushing = threading.Thread(target=self._provider.shutdown, name="slipstream-otlp", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def _end(span: Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)
    if code.name in SERVER_FAULTS:
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end()
