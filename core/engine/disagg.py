"""Prefill and decode on engines of their own: what an engine of either role does for a request, and which cannot.

A gateway sends a request to an engine that prefills, and then, or at the same time, to one that decodes. The first
keeps the keys of the prompt in host memory; the second fetches them, before it queues the request. What does not arrive
is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from core.config import EngineConfig
from core.disagg.interface import REASONS, Facts, Giver, Taker, TransferFailed, Wanted
from core.disagg.registry import SECRET, check_transfers, transfer_engine
from core.engine.build_pools import Pools
from core.errors import InvalidRequest, KeysLost, Overloaded, SlipstreamError
from core.models.base import ModelSpec
from core.models.identity import checkpoint_identity
from core.scheduler.fair_share import in_its_part
from core.scheduler.handing_over import HandingOver, whole_pages
from core.scheduler.scheduler import Scheduler
from core.scheduler.taking_over import Arrived, TakingOver
from core.secret_file import read_secret
from core.types.handover import Handed, Kept, TakeOver, claim_of
from core.types.io import GenerateRequest, ModelInfo
from core.types.request import Req
from core.types.stats import EngineStats, TransferStats

log = logging.getLogger(__name__)

LEAST_HOST_BYTES: Final = 1 << 30
"""Host memory of an engine that has a role and was not told how much: all keys pass through it."""
POLL_SECONDS: Final = 0.02


def with_host_memory(config: EngineConfig) -> EngineConfig:
    """`config`, with host memory where a role needs it. Raises ConfigError for transfers that cannot be."""
    if config.disagg.role == "both":
        return config
    check_transfers(config.disagg)
    if config.memory.host_cache_bytes:
        return config
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, host_cache_bytes=LEAST_HOST_BYTES))


def facts_of(config: EngineConfig, spec: ModelSpec, pools: Pools) -> dict[str, Any]:
    """What must be the same where keys of this engine are to mean the same; the version of the weights comes beside."""
    tensors = [*pools.kv.storage, *([] if pools.drafts is None else pools.drafts.kv.storage)]
    shapes = "; ".join(f"{each.dtype!s}{list(each.shape[1:])}" for each in tensors)
    return {
        "architecture": spec.architecture,
        "checkpoint": checkpoint_identity(Path(config.model.path)) if config.model.path else spec.name,
        "quantization": f"{spec.quantization} {config.model.quantization}",
        "dtype": str(spec.dtype),
        "kv_cache_dtype": config.model.kv_cache_dtype,
        "transfer_engine": config.disagg.transfer_engine,
        "page_size": pools.memory.page_size,
        "layers": hashlib.sha256(shapes.encode()).hexdigest(),
    }


class Disagg:
    """The role of an engine. `attach` it before requests come; loop thread only."""

    def __init__(self, config: EngineConfig, facts: Facts | None = None) -> None:
        """`facts`: None for an engine without a role. Raises StartupError for an address in use, ConfigError."""
        self._config = config.disagg
        self.role = config.disagg.role
        self.engine_id = secrets.token_hex(16)
        self._facts: Facts = facts or {}
        self._version: Callable[[], str] = str
        self._wake: Callable[[], None] = lambda: None
        self.giver: Giver | None = None
        self._taker: Taker | None = None
        self._scheduler: Scheduler | None = None
        self._queue = config.scheduler
        self._awaited: Counter[str] = Counter()
        """By tenant: requests that wait for keys."""
        self._unwanted: set[asyncio.Task[None]] = set()
        """Words to other engines that their keys are not needed."""
        self._failures: Counter[str] = Counter(dict.fromkeys(REASONS, 0) if self.role == "decode" else {})
        if self.role == "both" or facts is None:
            return
        way = transfer_engine(self._config)
        secret = read_secret(SECRET, self._config.transfer_secret_file)
        if self.role == "prefill":
            self.giver = way.giver(self._config, secret, self.engine_id, self._shared)
            log.info("keys are given away at %s port %d", *self.giver.address)
        else:
            self._taker = way.taker(self._config, secret, self._shared)

    @property
    def takes(self) -> bool:
        """Whether this engine decodes for others."""
        return self._taker is not None

    def woken(self) -> None:
        """Have the scheduler step soon. Any thread."""
        self._wake()

    def attach(self, wake: Callable[[], None], scheduler: Scheduler, version: Callable[[], str]) -> None:
        """`wake`: of the engine's loop, from any thread. `version`: of the weights that serve now."""
        self._wake, self._version, self._scheduler = wake, version, scheduler

    def told(self, info: ModelInfo) -> ModelInfo:
        """`info` with what gateways pair engines by."""
        if self.role == "both":
            return info
        port = 0 if self.giver is None else self.giver.address[1]
        return dataclasses.replace(info, role=self.role, engine_id=self.engine_id, transfer_port=port)

    def refuse_unservable(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest for a request that is meant for an engine of another role."""
        for field, asked, role in (
            ("hand_over", request.hand_over, "prefill"),
            ("take_over", request.take_over, "decode"),
        ):
            if asked is None:
                continue
            if self.role != role:
                raise InvalidRequest.of(field, f"is for a server with --role {role}; this one has --role {self.role}")
            if request.has_media or request.sampling.n > 1:
                raise InvalidRequest.of(field, "is not possible with images, sounds or several outputs")

    def keep(self, request: GenerateRequest, req: Req, adapter: str) -> None:
        """Note that keys of `req`, the one output of `request`, are handed over, if that is asked for.

        `adapter`: a digest of the weights of its adapter.
        """
        if request.hand_over is None or self.giver is None:
            return
        room = request.hand_over.room or secrets.token_hex(16)
        req.kept = Kept(_room(request, room), claim_of(req.prompt, adapter))
        req.max_new_tokens = 1
        self.giver.expect(req.kept.room)

    def handed(self, req: Req) -> Handed | None:
        """Where the keys of `req` are, which has ended; None if they are not handed over."""
        if req.kept is None or self.giver is None:
            return None
        host, port = self.giver.address
        tokens = whole_pages(req.prompt_len, self._page_size)
        return Handed(req.kept.room.rpartition("\0")[2], host, port, self.engine_id, tokens)

    async def take(self, request: GenerateRequest, req: Req, adapter: str) -> None:
        """Fetch the keys of `req`, the one output of `request`, if another engine has them. `adapter`: as of `keep`.

        Raises KeysLost where they do not arrive, and nothing is computed again by configuration; Overloaded where as
        many requests as may be queued wait for theirs.
        """
        source = request.take_over
        if source is None:
            return
        if not self._has_room(request.tenant):
            raise Overloaded("as many requests as may be queued wait for keys", reason="QUEUE_FULL")
        self._awaited[request.tenant] += 1
        try:
            await self._take(source, req, _room(request, source.room), claim_of(req.prompt, adapter))
        except TransferFailed as error:
            self._failures[error.reason] += 1
            log.warning("keys of %s port %d did not arrive (%s): %s", source.host, source.port, error.reason, error)
            if self._config.transfer_failure == "refuse":
                raise KeysLost("the keys of this request's prompt did not arrive; try again") from None
        finally:
            self._awaited -= Counter([request.tenant])

    def drop(self, reqs: Sequence[Req]) -> None:
        """`reqs` are not going to be queued."""
        for req in reqs:
            if req.kept is not None and self.giver is not None:
                self.giver.withdraw(req.kept.room)
            if self._taking is not None:
                self._taking.gone(req, 0)

    def abandon(self, why: SlipstreamError) -> None:
        """Give nothing away any more: what is here cannot be trusted. Engines that wait hear it at once."""
        if self.giver is not None:
            log.warning("keys are given away no more: %s", why)
            self.giver.close()

    async def given(self) -> None:
        """Wait until no other engine may still ask for what is kept here."""
        while self._handing is not None and len(self._handing):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures of transfers, where there are any."""
        if self._handing is not None:
            figures = TransferStats(
                kept=len(self._handing),
                given=self._handing.given,
                lost=self._handing.lost,
                given_tokens=self._handing.given_tokens,
            )
        elif self._taking is not None:
            figures = TransferStats(
                taken=self._taking.taken,
                taken_tokens=self._taking.taken_tokens,
                evicted=self._taking.evicted,
                failures=dict(self._failures),
            )
        else:
            return stats
        return dataclasses.replace(stats, transfers=figures)

    def close(self) -> None:
        """End what gives and takes. Blocks for a moment. Idempotent."""
        for side in (self.giver, self._taker):
            if side is not None:
                side.close()

    def longest_wait(self, request: GenerateRequest) -> float | None:
        """Seconds that `request` may wait before it is computed; None without end."""
        return self._queue.default_queue_timeout if request.queue_timeout is None else request.queue_timeout

    def _has_room(self, tenant: str) -> bool:
        """Whether one more request of `tenant` may wait for keys."""
        most, own = self._queue.max_queued_requests, self._awaited[tenant]
        return self._awaited.total() < most or in_its_part(own + 1, len({tenant, *self._awaited}), most)

    @property
    def _handing(self) -> HandingOver | None:
        kept = None if self._scheduler is None else self._scheduler.host_cache
        return None if kept is None else kept.handing

    @property
    def _taking(self) -> TakingOver | None:
        kept = None if self._scheduler is None else self._scheduler.host_cache
        return None if kept is None else kept.taking

    @property
    def _page_size(self) -> int:
        assert self._scheduler is not None, "attached"
        return self._scheduler.memory.page_size

    def _shared(self) -> Facts:
        return {**self._facts, "weight_version": self._version()}

    async def _take(self, source: TakeOver, req: Req, room: str, claim: str) -> None:
        scheduler, taking, taker = self._scheduler, self._taking, self._taker
        assert scheduler is not None and taking is not None and taker is not None, "refused"
        tokens = whole_pages(req.prompt_len, self._page_size)
        if not tokens:
            return
        wanted = Wanted(room, claim, 0, tokens, source.engine_id)
        if scheduler.held:
            # The pools may be lent, or about to be.
            self._decline(source, wanted)
            raise TransferFailed("asleep", "the engine is paused, asleep or changes its weights")
        start = taking.missing(req.prompt, tokens, req.salt) if req.reuses_prefix else tokens
        wanted = dataclasses.replace(wanted, start=start)
        if start == tokens:
            self._decline(source, wanted)
            return
        era, ready = taking.era, asyncio.Event()
        copy = taking.reserve(tokens - start, ready.set)
        if copy is None:
            self._decline(source, wanted)
            raise TransferFailed("no_room", f"host memory has no room for {tokens - start} tokens")
        parts = taking.views(copy)
        try:
            await ready.wait()
            if taking.era != era or scheduler.held:
                self._decline(source, wanted)
                raise TransferFailed("asleep", "weights or pools were exchanged meanwhile")
            cached = await taker.take((source.host, source.port), wanted, parts)
            if taking.era != era:
                raise TransferFailed("asleep", "weights or pools were exchanged meanwhile")
        except BaseException:
            taker.settle(parts, partial(taking.give_up, copy))
            raise
        taking.adopt(req, Arrived(copy, start, cached))

    def _decline(self, source: TakeOver, wanted: Wanted) -> None:
        """Ask for no bytes of what is `wanted`, beside all else: the other engine keeps them until it was asked."""
        assert self._taker is not None, "refused"
        if len(self._unwanted) >= self._queue.max_queued_requests:
            return
        nothing = dataclasses.replace(wanted, start=wanted.tokens)
        task = asyncio.create_task(_told(self._taker.take((source.host, source.port), nothing, [])))
        self._unwanted.add(task)
        task.add_done_callback(self._unwanted.discard)


async def _told(taking: Awaitable[int]) -> None:
    """What is not needed may fail to be told: the other engine gives it up by itself."""
    with contextlib.suppress(TransferFailed):
        await taking


def no_role() -> Disagg:
    """Of an engine that does both phases of all requests."""
    return Disagg(EngineConfig())


def _room(request: GenerateRequest, room: str) -> str:
    """Tenants have rooms of their own, whatever names their gateways give them: salts hold the names of tenants.

    `request.tenant` may be an address instead, and a gateway of two networks comes to each engine from another one.
    """
    return f"{hashlib.sha256(request.cache_salt.encode()).hexdigest()}\0{room}"
