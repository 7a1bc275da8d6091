"""Which error a client may be told when: each needs a cause, in what the client asked or in what the run did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from core.errors import SlipstreamError
from tests.proofs.sim.shell.loop import GRAIN
from tests.proofs.sim.story import Violation

if TYPE_CHECKING:
    from tests.proofs.sim.shell.clients import Client

UNBOUNDED = 1000
"""No reader here leaves so many tokens unread."""
ROOMY = 1 << 20
"""Bytes that no run fills with histories."""

Legal = Callable[["Client"], bool]


def _others_stream(client: Client) -> bool:
    """What it reads may have begun with another caller's call."""
    return client.plan.kind == "keep" and _shared(client)


def _queue_timeout(client: Client) -> bool:
    if _others_stream(client):
        return True
    own, default = client.plan.asked.queue_timeout, client.world.scenario.sizes.config.default_queue_timeout
    waits = [each for each in (own, default) if each is not None]
    return bool(waits) and client.world.loop.now >= client.began_at + min(waits) - GRAIN


def _deadline(client: Client) -> bool:
    deadline = client.plan.asked.deadline
    return _others_stream(client) or (deadline is not None and client.world.loop.now >= deadline - GRAIN)


def _dead(client: Client) -> bool:
    return client.world.dead or any(end.is_closing() for each in client.lost_front_ends for end in each.ends)


def _shared(client: Client) -> bool:
    return client.world.ids[client.world.scoped(client.plan)] > 1


def _replaced(client: Client) -> bool:
    """Whether it may have come back when another stream had its name."""
    return client.opened and _shared(client)


def _tight(client: Client) -> bool:
    scenario = client.world.scenario
    return min(scenario.resume_bytes, scenario.resume_tenant_bytes) < ROOMY


def _expired(client: Client) -> bool:
    waited = client.world.loop.now - client.left_at
    return _shared(client) or waited >= client.world.scenario.resume_seconds - GRAIN


_LEGAL: dict[str, Legal] = {
    "INVALID_REQUEST": lambda client: client.plan.bad,
    "ADAPTER_NOT_FOUND": lambda client: client.plan.adapter in client.world.unloaded,
    "DUPLICATE_REQUEST_ID": _shared,
    "QUEUE_FULL": lambda client: True,
    "CONCURRENCY_LIMIT": lambda client: client.world.scenario.max_concurrent is not None,
    "TENANT_CONCURRENCY_LIMIT": lambda client: bool(client.world.scenario.tenants),
    "TENANT_RATE_LIMIT": lambda client: bool(client.world.scenario.tenants),
    "RESUME_BYTES": lambda client: client.plan.kind == "keep" and _tight(client),
    "RESUME_OFF": lambda client: client.world.scenario.resume_seconds == 0,
    "QUEUE_TIMEOUT": _queue_timeout,
    "DEADLINE_EXCEEDED": _deadline,
    "SLOW_CONSUMER": lambda client: client.world.scenario.max_pending < UNBOUNDED or _tight(client),
    "REQUEST_FAILED": lambda client: bool(client.world.process.device.spoiled),
    "REQUEST_ABORTED": lambda client: client.world.scoped(client.plan) in client.world.aborted,
    "ENGINE_DEAD": _dead,
    "DRAINING": lambda client: client.world.ended,
    "STREAM_EXPIRED": _expired,
    "STREAM_EVICTED": _tight,
    "STREAM_REPLACED": _replaced,
    "POSITION_TOO_OLD": _tight,
    "STREAM_TAKEN_OVER": _shared,
}


def refuse_illegal(client: Client, error: SlipstreamError, *, aborting: bool = False) -> None:
    """Raise Violation unless `error` is one that this client may be told now."""
    client.world.note(f"{client.plan.name} is told {error.reason}{' when it aborts' * aborting}")
    legal = _LEGAL.get(error.reason)
    if legal is None or not legal(client):
        raise Violation("illegal_error", f"{client.plan.name} is told {error!r}, which nothing here can cause")
