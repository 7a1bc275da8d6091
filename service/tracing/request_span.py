"""The events of a request that servicers report to its span. Without a tracer each only reads a context variable."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import grpc.aio

from core.types.io import Finished, GenerateRequest
from service.tracing.trace_context import sampled_trace


class RequestSpan(Protocol):
    """The span of one call."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if the trace is not sampled."""
        ...

    def queued(self, request: GenerateRequest) -> None:
        """The request goes to the engine now."""
        ...

    def finished(self, event: Finished) -> None:
        """One of its outputs has ended."""
        ...


current_span: ContextVar[RequestSpan | None] = ContextVar("slipstream_span", default=None)
"""Within a call: its span; None without a tracer."""


def traced(request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> GenerateRequest:
    """`request` with the id of the sampled trace that it belongs to, if any. Call it just before it is queued."""
    span = current_span.get()
    if span is None:
        metadata: Any = context.invocation_metadata()
        trace_id = sampled_trace(metadata)
    else:
        span.queued(request)
        trace_id = span.trace_id
    return replace(request, trace_id=trace_id) if trace_id else request


def note_finished(event: Finished) -> None:
    """One output of the current call has ended."""
    span = current_span.get()
    if span is not None:
        span.finished(event)
