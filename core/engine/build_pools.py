"""Sizes the pools of an engine, and builds the host and the device side of each.

Adapters are loaded first, because the pools share the memory that adapters leave.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from core.config import EngineConfig, MemoryConfig
from core.device.streams import DeviceStreams
from core.engine.adapters.build import Adapters, build_adapters, reserved_bytes
from core.engine.adapters.rows import AdapterRows
from core.engine.host_memory import build_host_memory, build_passage, build_returns, not_copied
from core.executor.interface import MAX_DEPTH
from core.memory.companion import Companion, DeviceCompanion
from core.memory.cross.cross_pages import CROSS, CrossPages
from core.memory.cross.cross_pool import CrossPool
from core.memory.draft_pool import DraftLayers, DraftPool
from core.memory.host_arena import HostArena
from core.memory.host_prefixes import HostMemory
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateSlots
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.row_memory import RowMemory
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pages import WindowPages
from core.memory.window.window_pool import SlidingWindowPool
from core.memory.window.window_sizing import SplitLayers, divide_pages
from core.models.base import Model, ModelSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.prefix.registry import build_prefix_cache
from core.prefix.tenants import TenantOf

logger = logging.getLogger(__name__)

PORTABLE: Final = (STATES, WINDOW)
"""Pools of which something goes along with a prompt to an engine that decodes."""
DRAFTING_ROWS: Final = 4
"""Of so many rows all drafts can be verified in one step where each leaves a recurrent state; more rows share the room.
Beyond, drafts seldom pay, and a state may take as much memory as the keys of a thousand tokens (decision 38)."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of an engine. Both sides of a pool have the same size."""

    memory: RequestMemory
    """The host sides of all pools."""
    requests: ReqToTokenPool
    kv: KVPool
    context_length: int
    companions: Mapping[str, DeviceCompanion]
    """Companion name -> its device side."""
    adapters: Adapters
    max_input_length: int
    """Tokens of the longest input that a client may send."""
    host: HostMemory | None = None
    """Room for keys and values in host memory; None where all is computed again."""
    drafts: DraftPool | None = None
    """Keys and values of what drafts; None where nothing does that keeps any."""


def _prompt_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """Most prompt tokens of one step: the last chunk goes on to the end of an image that begins in it."""
    budget = config.scheduler.prompt_tokens
    if spec.vision is None:
        return budget
    return budget - 1 + (spec.vision.length or min(config.model.max_image_tokens, spec.context_length))


def build_pools(
    config: EngineConfig, model: Model, streams: DeviceStreams, drafts: int = 0, keeps: DraftLayers | None = None
) -> Pools:
    """Size the pools as configured, else from the memory that is left, and build both sides of each.

    `drafts`: the most that a step verifies for one row; 0 where speculation is off. `keeps`: what their drafter keeps
    in the same pages. Raises StartupError when memory is too small, or an adapter given at start cannot be loaded.
    """
    spec, memory, format = model.spec, config.memory, KV_FORMATS[config.model.kv_cache_dtype]
    # First, because the KV pool is sized from what the adapters leave.
    adapters = build_adapters(config.lora, model, streams.device)
    companions: dict[str, DeviceCompanion] = {**adapters.companions}
    context = min(spec.context_length, config.model.context_length or spec.context_length)
    tracking = _tracking(config, drafts)
    # Unset: a slot for the state of each request, and with a prefix cache as many again for snapshots.
    slots = memory.max_state_slots or memory.max_running_requests * (1 if tracking is None else 2)
    draft_room = drafts * min(DRAFTING_ROWS, memory.max_running_requests)
    cross = cross_size(config, spec)
    # One slot more: slot 0 is padding (law 6).
    reserved = MambaPool.bytes_per_slot(spec.state_layers) * (1 + slots + draft_room) + cross.reserved_bytes
    reserved += reserved_bytes(config.lora, adapters.table, streams.device)
    layers = SplitLayers.of(spec.kv_layers, context, windows=memory.sliding_window_pool)
    # Steps in flight may each verify so many drafts, and which are right is known when they are over.
    doubt = drafts * (MAX_DEPTH if config.executor.overlap else 1)
    bounds = layers.bounds(memory.page_size, _prompt_tokens(config, spec), doubt)
    kept_each, kept_spare = _draft_bytes(keeps, memory)
    longest, beside, left = max(context, cross.max_input), cross.bytes_per_token + kept_each, reserved + kept_spare
    pages = divide_pages(memory, layers, bounds, spec.dtype, longest, streams.device, left, beside, format)
    allocator = PagedKVAllocator(pages.kv, memory.page_size)
    requests = ReqToTokenPool(memory.max_running_requests, _whole_pages(context, memory), streams.device)
    # What an encoder reads depends on tokens beside the prefix, and so do outputs of an encoder-decoder.
    kept = "none" if spec.encoder or spec.whole_prompts else memory.prefix_cache
    cache = build_prefix_cache(kept, memory.page_size, adapters.table.tenant)
    followers: list[Companion] = []
    if config.lora.enabled:
        followers.append(AdapterRows(adapters.table, requests.num_rows))
    if spec.state_layers:
        followers.append(StateSlots(slots, requests.num_rows, tracking, draft_room))
        states = MambaPool(spec.state_layers, slots, streams.device, draft_room)
        companions[STATES] = HybridReqToTokenPool(requests, states)
    if spec.encoder:
        follower, companions[CROSS] = build_cross_pools(spec.encoder, cross, memory, pages.kv, requests, spec.dtype)
        followers.append(follower)
    if bounds is not None:
        followers.append(WindowPages(pages.window, pages.kv, requests.num_rows, bounds))
        windowed = KVPool(layers.windowed, pages.window, memory.page_size, spec.dtype, streams.device, WINDOW, format)
        companions[WINDOW] = SlidingWindowPool(windowed, pages.kv)
    kv = KVPool(layers.full, pages.kv, memory.page_size, spec.dtype, streams.device, format=format)
    tenant, each = None if kept == "none" else adapters.table.tenant, kv.bytes_per_token + kept_each
    return Pools(
        memory=_held(spec, followers)(requests.rows, allocator, cache, context, followers, spec.reach),
        requests=requests,
        kv=kv,
        context_length=context,
        companions=companions,
        adapters=adapters,
        max_input_length=cross.max_input or (context if spec.whole_prompts else context - 1),
        host=_host_memory(config, each, companions, tenant, drafts),
        drafts=None if keeps is None else _draft_pool(keeps, pages.kv, memory, streams.device),
    )


def _held(spec: ModelSpec, followers: Sequence[Companion]) -> type[RequestMemory]:
    """What its requests hold: without keys, values and states a row is all."""
    return RequestMemory if spec.kv_layers or followers else RowMemory


def _host_memory(
    config: EngineConfig, each: int, companions: Mapping[str, DeviceCompanion], tenant: TenantOf | None, drafts: int
) -> HostMemory | None:
    beside, role = not_copied(companions), config.disagg.role
    along = {name: _slot_bytes(companions[name].storage) for name in PORTABLE if name in companions}
    if role != "both" and (beside or (tenant is None and drafts)):
        return build_passage(role, config.memory, each, along, companions, leaves=not drafts)
    if config.memory.host_cache_bytes and along and CROSS not in companions and not drafts:
        return build_returns(config.memory, each, along, tenant)
    return build_host_memory(config.memory, each, beside, tenant, rejoins=not drafts)


def _slot_bytes(storage: Sequence[torch.Tensor]) -> int:
    return sum(tensor[0].nbytes for tensor in storage)


def build_arena(pools: Pools, streams: DeviceStreams) -> HostArena:
    """The bytes of `pools.host`, and the copies there and back. Raises ConfigError where the machine has no room."""
    assert pools.host is not None, "asked for where there is room"
    # What a drafter keeps of a token has the same slot.
    kept, tier = [] if pools.drafts is None else pools.drafts.kv.storage, pools.host.tier
    beside = [(name, pools.companions[name].storage) for name in tier.beside]
    keys = (pools.kv.name, [*pools.kv.storage, *kept])
    return HostArena(keys, tier.num_blocks, tier.block, streams, beside=beside)


def _whole_pages(tokens: int, memory: MemoryConfig) -> int:
    """`tokens`, rounded up: whole pages are written into the table, so its width is a whole number of pages."""
    return -(-tokens // memory.page_size) * memory.page_size


def _draft_bytes(keeps: DraftLayers | None, memory: MemoryConfig) -> tuple[int, int]:
    """(bytes that a drafter keeps for each token of the pages, bytes of its pages beside those)."""
    if keeps is None:
        return 0, 0
    spare = keeps.spare_pages(memory.max_running_requests, memory.page_size)
    # One page more: page 0 is padding here too.
    return keeps.bytes_per_token, (spare + 1) * memory.page_size * keeps.bytes_per_token


def _draft_pool(keeps: DraftLayers, pages: int, memory: MemoryConfig, device: torch.device) -> DraftPool:
    return DraftPool(keeps, pages, memory.page_size, memory.max_running_requests, device)


def _tracking(config: EngineConfig, drafts: int) -> Tracking | None:
    """When snapshots of recurrent states are kept; None without a prefix cache, where no request would find them.

    Two in decode where a row may be before the newer one when that is planned: a step is in flight, or verifies drafts.
    """
    memory = config.memory
    if memory.prefix_cache == "none":
        return None
    interval = -(-memory.state_track_interval // memory.page_size) * memory.page_size
    return Tracking(memory.page_size, interval, buffers=2 if config.executor.overlap or drafts else 1)


@dataclass(frozen=True, slots=True)
class CrossSize:
    """What the cross pool takes of the memory that it shares with the KV pool; all 0 without an encoder."""

    max_input: int = 0
    """Tokens of the longest input."""
    bytes_per_token: int = 0
    """Bytes of cross pages for each decoder token, where both pools get the same number of pages; else 0."""
    reserved_bytes: int = 0
    """Bytes of the cross pages that the configuration asks for; 0 where it leaves that open."""


def cross_size(config: EngineConfig, spec: ModelSpec) -> CrossSize:
    """The size for `spec`. A configured context length bounds the encoder's input as it bounds the decoder's tokens."""
    if spec.encoder is None:
        return CrossSize()
    limit = min(spec.encoder.max_tokens, config.model.context_length or spec.encoder.max_tokens)
    each = KVPool.bytes_per_token_for(spec.encoder.cross_layers, spec.dtype)
    asked = config.memory.max_encoder_tokens
    return CrossSize(limit, each) if asked is None else CrossSize(limit, 0, asked * each)


def build_cross_pools(
    encoder: EncoderSpec,
    size: CrossSize,
    memory: MemoryConfig,
    kv_pages: int,
    requests: ReqToTokenPool,
    dtype: torch.dtype,
) -> tuple[CrossPages, CrossPool]:
    """Host and device side of the cross pages: as many as the KV pool has, unless `max_encoder_tokens` is set."""
    asked = memory.max_encoder_tokens
    pages = kv_pages if asked is None else asked // memory.page_size
    host = CrossPages(pages, memory.page_size, requests.num_rows)
    pool = KVPool(encoder.cross_layers, pages, memory.page_size, dtype, requests.device)
    return host, CrossPool(requests, pool, size.max_input)
