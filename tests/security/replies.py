"""What a client reads when a call fails, and what it must never read there.

Every test of this package passes its failures through `read`, so that no refusal anywhere escapes the check.
"""

from __future__ import annotations

import re

import grpc
import grpc.aio

from service.client import CallFailed

FORBIDDEN = re.compile(
    r"0x[0-9a-fA-F]{6,}|/[a-z]+/|Traceback|\w(?:Error|Exception)\b|<class|\bobject at\b|\.py\b|\bsite-packages\b"
    r"|safetensors|torch|tokenizers|jinja|protobuf\.|\bself\b|\bNone\b|numpy"
)
"""Addresses, paths, names of Python's and of libraries' things."""

DOCUMENTED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.CANCELLED,
        # Of Attach alone: a reader that is taken over, and a place that the stream has not or no longer.
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""What may come of any input. UNKNOWN is never ours, and INTERNAL is a bug here: no test of this package breaks the
device."""

SEEN: list[str] = []
"""Every text checked so far in this run."""


def texts_of(error: grpc.aio.AioRpcError) -> list[str]:
    """Everything readable in a failure: details, trailers, and the strings inside the packed status."""
    trailers = dict(error.trailing_metadata() or ())
    packed = trailers.pop("grpc-status-details-bin", b"")
    inside = packed.decode("latin-1") if isinstance(packed, bytes) else packed
    # The type URLs of the details are part of the protocol.
    inside = re.sub(r"type\.googleapis\.com/google\.rpc\.\w+", "", inside)
    return [error.details() or "", inside, *map(str, trailers.values())]


def read(error: grpc.aio.AioRpcError, secrets: tuple[str, ...] = ()) -> CallFailed:
    """The failure as clients take it, after checking its code and every text in it."""
    assert error.code() in DOCUMENTED, (error.code(), error.details())
    for text in texts_of(error):
        SEEN.append(text)
        found = FORBIDDEN.search(text)
        assert not found, f"{found.group()!r} in {text!r}"
        leaked = [secret for secret in secrets if secret in text]
        assert not leaked, f"{leaked} in {text!r}"
    return CallFailed(error)
