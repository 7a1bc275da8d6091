"""The caller of a call, by name and by address."""

from __future__ import annotations

from contextvars import ContextVar

from service.rpc.interceptors import Context

caller_name: ContextVar[str | None] = ContextVar("slipstream_caller", default=None)
"""Within a call: the name beside the caller's token in the token file, or in its certificate; None without names."""

caller_address: ContextVar[str] = ContextVar("slipstream_caller_address", default="")
"""Within a call that has passed `CallGate`: the address that the call comes from, without its port."""


def caller_of(context: Context) -> str:
    """The key under which a call's use of the server is counted: its caller's name, else the address without port."""
    return caller_name.get() or address_of(context.peer())


def address_of(peer: str) -> str:
    """The part of `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711` before the port; a peer of another form as it is."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
