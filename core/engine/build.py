"""Puts an engine together: the only place that knows all constructors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams, resolve_device
from core.engine.adapters.build import Adapters, build_adapters, reserved_bytes
from core.engine.async_engine import AsyncEngine, Parts
from core.engine.cross_pools import build_cross_pools, cross_size
from core.engine.encoder_input import encoder_input
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.executor.decode_graphs import graph_sizes
from core.executor.device_state import DeviceState
from core.executor.forward_thread import ForwardThread
from core.executor.inline import InlineExecutor
from core.executor.interface import Executor
from core.executor.step import StepRunner
from core.lanes import LaneRecorder
from core.memory.companion import Companion, DeviceCompanion
from core.memory.cross.cross_pages import CROSS
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.kv_pool import KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateSlots
from core.memory.recurrent.state_snapshots import Tracking
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.request_memory import RequestMemory
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pages import WindowPages
from core.memory.window.window_pool import SlidingWindowPool
from core.memory.window.window_sizing import SplitLayers, divide_pages
from core.models.base import Model
from core.models.loader import load_model
from core.prefix.registry import build_prefix_cache
from core.relay.future_map import FutureMap
from core.sampling.grammar.registry import choose
from core.sampling.grammar.vocabulary import Vocabulary
from core.sampling.sampler import Sampler
from core.scheduler.scheduler import Emit, Scheduler
from core.text.tokenizer import Tokenizer
from core.types.io import ModelInfo
from core.types.sampling_params import SamplingParams

Progress = Callable[[str, float], None]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> AsyncEngine:
    """Load the checkpoint and build an engine that is ready for `start`.

    Blocks for as long as the weights take; `progress(stage, fraction)` is called along the way. Raises StartupError.
    """
    device = resolve_device(config.executor.device)
    torch.set_num_threads(config.executor.threads())
    tokenizer = Tokenizer.load(config.model.path)
    if tokenizer.chats is not None:
        tokenizer.chats.start()
    # Adapters hook the module tree, which native code does not go through.
    native = "off" if config.lora.enabled else config.model.native
    model = load_model(dataclasses.replace(config.model, native=native), device, progress)
    return assemble(config, model, tokenizer, DeviceStreams(device))


def assemble(config: EngineConfig, model: Model, tokenizer: Tokenizer, streams: DeviceStreams) -> AsyncEngine:
    """An engine around a model that is loaded already; benchmarks and tests bring an emulated one."""
    pools = _build_pools(config, model, streams)
    spec, table = model.spec, pools.adapters.table
    grammars = _build_grammars(config, model, tokenizer)
    inputs = InputProcessor(
        tokenizer,
        pools.memory,
        spec.vocab_size,
        pools.context_length,
        config.seed,
        spec.hidden_size,
        table,
        encoder_input(spec.encoder, pools.max_input_length),
    )
    lanes = LaneRecorder()
    # Capturing takes seconds, in which the loop that starts the engine must not be held up.
    captures = config.executor.cuda_graphs and streams.device.type == "cuda"
    runner = _build_runner(config, model, streams, pools, lanes) if captures else None
    parts = Parts(
        inputs=inputs,
        adapters=pools.adapters.loader,
        grammars=grammars,
        model_info=_model_info(config, model, tokenizer, pools, grammars.backend),
        new_executor=lambda wake: _build_executor(
            config, runner or _build_runner(config, model, streams, pools, lanes), wake
        ),
        new_scheduler=lambda executor, emit: _build_scheduler(config, model, streams, pools, executor, emit, lanes),
        lanes=lanes,
    )
    return AsyncEngine(config, parts)


@dataclass(frozen=True, slots=True)
class Pools:
    """Host and device sides of the pools, of one size."""

    memory: RequestMemory
    requests: ReqToTokenPool
    kv: KVPool
    context_length: int
    companions: Mapping[str, DeviceCompanion]
    adapters: Adapters
    max_input_length: int
    """Tokens of the longest input that a client may send."""


def _build_pools(config: EngineConfig, model: Model, streams: DeviceStreams) -> Pools:
    spec, memory = model.spec, config.memory
    # Before the KV pool is sized from what is left.
    adapters = build_adapters(config.lora, model, streams.device)
    companions: dict[str, DeviceCompanion] = {**adapters.companions}
    context = min(spec.context_length, config.model.context_length or spec.context_length)
    tracking = _tracking(config)
    slots = memory.max_state_slots or memory.max_running_requests * (1 if tracking is None else 2)
    cross = cross_size(config, spec)
    reserved = MambaPool.bytes_per_slot(spec.state_layers) * (slots + 1) + cross.reserved_bytes
    reserved += reserved_bytes(config.lora, adapters.table, streams.device)
    layers = SplitLayers.of(spec.kv_layers, context, windows=memory.sliding_window_pool)
    bounds = layers.bounds(memory.page_size, config.scheduler.chunked_prefill_size)
    longest, beside = max(context, cross.max_input), cross.bytes_per_token
    pages = divide_pages(memory, layers, bounds, spec.dtype, longest, streams.device, reserved, beside)
    allocator = PagedKVAllocator(pages.kv, memory.page_size)
    # Whole pages are written into the table, so its width is a whole number of pages too.
    width = allocator.pages_for(context) * memory.page_size
    requests = ReqToTokenPool(memory.max_running_requests, width, streams.device)
    # Outputs of an encoder-decoder depend on more than the tokens before them, so no prefix of theirs is kept.
    kept = "none" if spec.encoder else memory.prefix_cache
    cache = build_prefix_cache(kept, memory.page_size, adapters.table.tenant)
    followers: list[Companion] = []
    if spec.state_layers:
        followers.append(StateSlots(slots, requests.num_rows, tracking))
        companions[STATES] = HybridReqToTokenPool(requests, MambaPool(spec.state_layers, slots, streams.device))
    if spec.encoder:
        follower, companions[CROSS] = build_cross_pools(spec.encoder, cross, memory, pages.kv, requests, spec.dtype)
        followers.append(follower)
    if bounds is not None:
        followers.append(WindowPages(pages.window, pages.kv, requests.num_rows, bounds))
        windowed = KVPool(layers.windowed, pages.window, memory.page_size, spec.dtype, streams.device, WINDOW)
        companions[WINDOW] = SlidingWindowPool(windowed, pages.kv)
    return Pools(
        memory=RequestMemory(requests.rows, allocator, cache, context, followers, spec.reach),
        requests=requests,
        kv=KVPool(layers.full, pages.kv, memory.page_size, spec.dtype, streams.device),
        context_length=context,
        companions=companions,
        adapters=adapters,
        max_input_length=cross.max_input or context - 1,
    )


def _tracking(config: EngineConfig) -> Tracking | None:
    """When recurrent states are kept; without a prefix cache nobody would find them."""
    memory = config.memory
    if memory.prefix_cache == "none":
        return None
    interval = -(-memory.state_track_interval // memory.page_size) * memory.page_size
    return Tracking(memory.page_size, interval, buffers=2 if config.executor.overlap else 1)


def _build_executor(config: EngineConfig, runner: StepRunner, wake: Callable[[], None]) -> Executor:
    return ForwardThread(runner, wake) if config.executor.overlap else InlineExecutor(runner, wake)


def _build_runner(
    config: EngineConfig, model: Model, streams: DeviceStreams, pools: Pools, lanes: LaneRecorder
) -> StepRunner:
    executor = config.executor
    checks = DeviceChecks(AssertMode(executor.assert_mode), streams.device)
    attention = build_attention(executor.attention_backend, streams.device)
    model.bind(pools.kv, attention, pools.companions)
    state = DeviceState(
        pool=pools.requests,
        kv_pool=pools.kv,
        future_map=FutureMap(pools.requests, streams, checks),
        checks=checks,
        streams=streams,
        staging=Staging(streams.device),
        model=model,
        sampler=Sampler(model.spec.vocab_size, streams.device),
        companions=pools.companions,
        attention=attention,
        graph_sizes=graph_sizes(config.memory.max_running_requests) if executor.cuda_graphs else (),
        lanes=lanes,
    )
    return StepRunner(state)


def _build_scheduler(
    config: EngineConfig,
    model: Model,
    streams: DeviceStreams,
    pools: Pools,
    executor: Executor,
    emit: Emit,
    lanes: LaneRecorder,
) -> Scheduler:
    return Scheduler(
        config.scheduler,
        pools.memory,
        executor,
        emit,
        max_len=pools.requests.max_context_len,
        vocab_size=model.spec.vocab_size,
        eos_ids=model.spec.eos_token_ids,
        pin=Staging(streams.device).pinned,
        slot_writes=pools.adapters.table.take_writes,
        lanes=lanes,
    )


def _build_grammars(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> GrammarCompiler:
    backend, spec = tokenizer.backend, model.spec
    # Tokenizers written in Python have no form that the grammar libraries read.
    new = None if backend is None else partial(Vocabulary.of, backend, spec.vocab_size, spec.eos_token_ids)
    return GrammarCompiler(config.grammar, choose(config.grammar.backend), new)


def _model_info(
    config: EngineConfig, model: Model, tokenizer: Tokenizer, pools: Pools, grammar_backend: str | None
) -> ModelInfo:
    spec = model.spec
    return ModelInfo(
        name=config.model.served_name or spec.name,
        architecture=spec.architecture,
        dtype=str(spec.dtype).removeprefix("torch."),
        vocab_size=spec.vocab_size,
        context_length=pools.context_length,
        max_input_length=pools.max_input_length,
        bos_token_id=spec.bos_token_id,
        eos_token_ids=spec.eos_token_ids,
        default_sampling=dataclasses.replace(SamplingParams(), **dict[str, Any](spec.sampling_defaults)),
        has_chat_template=tokenizer.has_chat_template,
        quantization=spec.quantization,
        embedding_dimension=spec.hidden_size,
        grammar_backend=grammar_backend or "",
    )
