"""The caller of a call, by name and by address."""

from __future__ import annotations

from contextvars import ContextVar

from service.rpc.interceptors import Context

caller_name: ContextVar[str | None] = ContextVar("slipstream_caller", default=None)
"""Within a call: the name beside the caller's token, or in its certificate; None where callers have none."""

caller_address: ContextVar[str] = ContextVar("slipstream_caller_address", default="")
"""Within a call that has passed the gate: the address that it comes from, without its port."""


def caller_of(context: Context) -> str:
    """Whose share of the server a call uses: its tenant's, or without one that of the address it comes from."""
    return caller_name.get() or address_of(context.peer())


def address_of(peer: str) -> str:
    """Of `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711` what comes before the port; another peer as it is."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
