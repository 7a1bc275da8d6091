"""The requests that each tenant has running, and the tokens that it has used, counted in the engine's process.

Requests carry their tenant in their id (`service.tenant_ids`), so the engine's own table of streams is all that is
needed. A census of it is O(streams) and made at most every CENSUS_SECONDS, however often tenants ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from core.engine.api import OpenStreams
from core.types.streams import StreamInfo
from service.access.tenant_file import OTHER
from service.tenant_ids import tenant_of_id

CENSUS_SECONDS: Final = 0.1
KINDS: Final = ("prompt", "generated")
RUNNING: Final = frozenset({"prefill", "decode"})


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Requests of one tenant that have not ended. `tokens` counts prompts and outputs of the running ones."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0

    @property
    def live(self) -> int:
        """Running and waiting requests together."""
        return self.running + self.waiting

    def plus(self, stream: StreamInfo) -> TenantLoad:
        """This load with one request more."""
        if stream.state not in RUNNING:
            return replace(self, waiting=self.waiting + 1)
        tokens = self.tokens + stream.prompt_tokens + stream.output_tokens
        return replace(self, running=self.running + 1, tokens=tokens)


class TenantUsage:
    """Loads of tenants, and the tokens of requests that ended.

    `count(label, kind, amount)` adds to a metric; `kind` is one of KINDS. `label(tenant)` is the tenant's label in
    metrics, of which there is a bounded number.
    """

    def __init__(
        self,
        count: Callable[[str, str, int], None],
        label: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._label, self._clock = count, label, clock
        self._census: Mapping[str, TenantLoad] = {}
        self._counted_at = -CENSUS_SECONDS
        for kind in KINDS:
            count(OTHER, kind, 0)

    def load(self, tenant: str, streams: OpenStreams | None) -> TenantLoad:
        """The load of `tenant`, at most CENSUS_SECONDS old."""
        now = self._clock()
        if streams is not None and now - self._counted_at >= CENSUS_SECONDS:
            self._census, self._counted_at = _census(streams), now
        return self._census.get(tenant, TenantLoad())

    def ended(self, stream: StreamInfo) -> None:
        """Count the tokens of a request that has ended in any way. A prompt that never left the queue cost nothing."""
        label = self._label(tenant_of_id(stream.request_id))
        if stream.state != "waiting":
            self._count(label, "prompt", stream.prompt_tokens)
        self._count(label, "generated", stream.output_tokens)


def _census(streams: OpenStreams) -> dict[str, TenantLoad]:
    found: dict[str, TenantLoad] = {}
    for stream in streams.oldest(len(streams)):
        tenant = tenant_of_id(stream.request_id)
        found[tenant] = found.get(tenant, TenantLoad()).plus(stream)
    return found
