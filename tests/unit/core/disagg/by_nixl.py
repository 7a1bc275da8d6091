"""The two sides of a transfer by NIXL on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from core.disagg.nixl_agent import NixlAgent
from core.disagg.over_nixl import NixlReceiver, NixlSender
from core.disagg.tcp_giver import TcpGiver
from core.disagg.tcp_taker import TcpTaker
from tests.unit.core.disagg.transfer import sides

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (slipstream[nixl])")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two machines: memory of a process that is frozen could be read otherwise."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@contextmanager
def by_nixl(**changes: Any) -> Iterator[tuple[TcpGiver, TcpTaker]]:
    sender, receiver = NixlSender(NixlAgent(loopback=True)), NixlReceiver(NixlAgent(loopback=True))
    with sides(sender=sender, receiver=receiver, **changes) as (giver, taker):
        yield giver, taker
