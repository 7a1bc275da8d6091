"""Core errors to gRPC statuses: the only mapping, and the only place that writes a status into a call.

Every status is set with `set_code` and followed by a plain return, never by `context.abort`: after a write that timed
out, abort fails or hangs because the send is still pending. Details never carry more than the error's own message. An
error that is not in the table becomes INTERNAL, with an incident number that is also in the log.
"""

from __future__ import annotations

import logging
import random
import uuid
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from core.errors import (
    AdapterExists,
    AdapterNotFound,
    AdaptersOff,
    Asleep,
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    KeysLost,
    Overloaded,
    Paused,
    QueueTimeout,
    RequestAborted,
    RequestFailed,
    SlipstreamError,
    SlowConsumer,
    Unsupported,
)
from service.errors import (
    EngineSilent,
    NotPermitted,
    NotReady,
    PositionAhead,
    PositionTooOld,
    RequestIncomplete,
    ResumeOff,
    StreamNotFound,
    StreamTakenOver,
    TenantLockedOut,
    TenantSequences,
    Unauthenticated,
    UnknownService,
)

log = logging.getLogger(__name__)

DOMAIN = "slipstream"
TOKENS_EMITTED_TRAILER = "slipstream-tokens-emitted"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
NO_RETRY = "-1"
"""As a pushback: the client's library does not retry, whatever its policy says."""
LEAST_PUSHBACK_MILLIS = 1
"""Told to come back after 0 ms, a client of grpcio 1.85 that retries overload never does, and its call never ends."""
LONGEST_PUSHBACK_SECONDS = 10.0
"""Longest pushback. Past it the time is in `RetryInfo` only, for the caller; its gRPC library does not wait so long."""
DETAILS_TRAILER = "grpc-status-details-bin"

# A client's default limit for all trailers together is 8 KiB; past it the status itself would be lost.
MAX_VIOLATIONS = 16
MAX_DESCRIPTION_CHARS = 120
MAX_MESSAGE_CHARS = 500


CODES: dict[type[SlipstreamError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueTimeout: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowConsumer: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestFailed: grpc.StatusCode.INTERNAL,
    RequestAborted: grpc.StatusCode.CANCELLED,
    EngineDead: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    EngineSilent: grpc.StatusCode.UNAVAILABLE,
    UnknownService: grpc.StatusCode.NOT_FOUND,
    RequestIncomplete: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    TenantLockedOut: grpc.StatusCode.PERMISSION_DENIED,
    TenantSequences: grpc.StatusCode.PERMISSION_DENIED,
    AdapterNotFound: grpc.StatusCode.NOT_FOUND,
    AdapterExists: grpc.StatusCode.ALREADY_EXISTS,
    AdaptersOff: grpc.StatusCode.FAILED_PRECONDITION,
    ResumeOff: grpc.StatusCode.FAILED_PRECONDITION,
    StreamNotFound: grpc.StatusCode.NOT_FOUND,
    StreamTakenOver: grpc.StatusCode.ABORTED,
    PositionTooOld: grpc.StatusCode.OUT_OF_RANGE,
    PositionAhead: grpc.StatusCode.OUT_OF_RANGE,
    Paused: grpc.StatusCode.UNAVAILABLE,
    KeysLost: grpc.StatusCode.UNAVAILABLE,
    Asleep: grpc.StatusCode.FAILED_PRECONDITION,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
}
"""StartupError is absent on purpose: its text is for the operator and may hold a path."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The status that a client gets: the code, the text, `google.rpc` details, and trailers beside them."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...]
    trailers: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Trailing metadata: the details as `google.rpc.Status`, then the trailers."""
        code: int = self.code.value[0]
        status = Status(code=code, message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return ((DETAILS_TRAILER, status.SerializeToString()), *self.trailers)


LOST = ErrorStatus(grpc.StatusCode.CANCELLED, "the client is gone", ())
"""Counted and traced; it reaches no client."""


def status_of(error: BaseException) -> ErrorStatus:
    """The status for `error`. An error that is not in CODES is logged with its traceback and hidden from the client."""
    if not isinstance(error, SlipstreamError):
        return _internal(error)
    code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), None)
    if code is None:
        return _internal(error)
    message = _clip(error.message, MAX_MESSAGE_CHARS)
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN)]
    trailers: list[tuple[str, str]] = []
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error))
    if isinstance(error, Overloaded | EngineSilent):
        millis = _spread(error.retry_after)
        details.append(RetryInfo(retry_delay=Duration(seconds=millis // 1000, nanos=millis % 1000 * 1_000_000)))
        # No retry in two cases: (1) the caller itself set the time that it waits in the queue; (2) a library that waits
        # for so long looks as if it hung.
        silent = isinstance(error, QueueTimeout) or error.retry_after > LONGEST_PUSHBACK_SECONDS
        trailers.append((PUSHBACK_TRAILER, NO_RETRY if silent else str(millis)))
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Clients retry this code, by the published policy, also without a pushback. These errors must not be retried.
        trailers.append((PUSHBACK_TRAILER, NO_RETRY))
    return ErrorStatus(code, message, tuple(details), tuple(trailers))


def _spread(seconds: float) -> int:
    """Milliseconds from `seconds` to twice that, at random: clients refused in one moment come back spread out."""
    return max(LEAST_PUSHBACK_MILLIS, round(seconds * random.uniform(1.0, 2.0) * 1000))


def write_status(context: grpc.aio.ServicerContext[Any, Any], status: ErrorStatus) -> None:
    """Set `status` on the call and keep trailers that the handler has set. The handler must then return."""
    context.set_code(status.code)
    context.set_details(status.message)
    kept = tuple(context.trailing_metadata() or ())
    context.set_trailing_metadata((*kept, *status.metadata()))


def _internal(error: BaseException) -> ErrorStatus:
    incident = uuid.uuid4().hex[:12]
    log.error("incident %s: unhandled error in a call", incident, exc_info=error)
    info = ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"incident": incident})
    return ErrorStatus(grpc.StatusCode.INTERNAL, "internal error", (info,))


def _bad_request(error: InvalidRequest) -> BadRequest:
    shown = error.violations[:MAX_VIOLATIONS]
    return BadRequest(
        field_violations=[
            BadRequest.FieldViolation(
                field=_clip(violation.field, MAX_DESCRIPTION_CHARS),
                description=_clip(violation.description, MAX_DESCRIPTION_CHARS),
            )
            for violation in shown
        ]
    )


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
