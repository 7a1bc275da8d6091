"""The caller of a call, by name and by address."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

from core.types.io import EmbedRequest, GenerateRequest
from service.rpc.interceptors import Context

Request = TypeVar("Request", GenerateRequest, EmbedRequest)

caller_name: ContextVar[str | None] = ContextVar("slipstream_caller", default=None)
"""Within a call: the name beside the caller's token, or in its certificate; None where callers have none."""


def caller_of(context: Context) -> str:
    """Whose share of the server a call uses: its tenant's, or without one that of the address it comes from."""
    return caller_name.get() or address_of(context.peer())


def of_caller(asked: Request, context: Context) -> Request:
    """`asked` as a request of the caller that it is served for."""
    return replace(asked, tenant=caller_of(context))


def address_of(peer: str) -> str:
    """Of `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711` what comes before the port; another peer as it is."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
