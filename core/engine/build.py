"""Puts an engine together: the only place that knows all constructors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.attention.base import AttentionBackend
from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams, resolve_device
from core.distributed.pipeline_leader import PipelineLeader
from core.engine.build_pools import Pools, build_arena, build_pools
from core.engine.built_engine import BuiltEngine
from core.engine.determinism import prove_deterministic, settled
from core.engine.disagg import Disagg, facts_of, with_host_memory
from core.engine.disk_cache import build_disk_cache, with_disk
from core.engine.embedding_inputs import EmbeddingInputs
from core.engine.encoder_input import encoder_input
from core.engine.engine_parts import StepExecutor
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.engine.kv_storage import check_kv_format
from core.engine.labelling import Labelling, labelling_of
from core.engine.math_threads import use_threads
from core.engine.media_inputs import Sees, audio_inputs, image_inputs
from core.engine.peers import Peers, open_others
from core.engine.rank_settings import captures, ring_of
from core.engine.ranks import Ranks, verification
from core.engine.renewal import Loaded, Renewal, keeps_modules
from core.engine.speculation import Speculation, build_source, build_speculation, way_of, why_no_speculation
from core.engine.step_size import device_bytes, sized
from core.engine.step_times import time_steps
from core.errors import StartupError
from core.executor.decode_graphs import graph_sizes
from core.executor.device_state import DeviceState
from core.executor.forward_thread import ForwardThread
from core.executor.inline import InlineExecutor
from core.executor.interface import Executor, HostCopies
from core.executor.mixed_graphs import chunk_tokens
from core.executor.pipeline_thread import PipelineThread
from core.executor.step import StepRunner
from core.lanes import LaneRecorder
from core.memory.kv_format import KVFormat
from core.models.attention_proof import prove_attention, prove_codes
from core.models.base import LabelHead, Model, ModelSpec
from core.models.loader import load_head, load_model
from core.models.pooling_modules import read_pooling
from core.native.host import HostCode
from core.relay.future_map import FutureMap
from core.sampling.grammar.registry import choose
from core.sampling.grammar.vocabulary import Vocabulary
from core.sampling.registry import build_sampler
from core.scheduler.draft_depth import AdaptiveDepth
from core.scheduler.host_cache import HostCache
from core.scheduler.scheduler import Emit, Scheduler
from core.text.answers.answer_form import answer_form
from core.text.tokenizer import Tokenizer
from core.types.io import ModelInfo, Pooling
from core.types.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with (stage of the load, part of it that is done: 0 to 1)."""


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Load the checkpoint and build an engine, up to its `start`.

    Blocks for as long as the weights take; `progress(stage, fraction)` is called along the way. Raises StartupError.
    """
    device = resolve_device(config.executor.device)
    config = with_host_memory(settled(config, device))
    config = dataclasses.replace(config, memory=with_disk(config.memory))
    use_threads(config)
    tokenizer = Tokenizer.load(config.model.path)
    if tokenizer.chats is not None:
        tokenizer.chats.start()
    ranks = open_others(config, device)
    try:
        # The native decoder has no module tree.
        ring = None if ranks is None else ring_of(config, ranks.world)
        exchange = ranks.exchange if isinstance(ranks, Peers) else None
        kept = keeps_modules(config)
        model = load_model(config.model, device, progress, keeps_modules=kept, ring=ring, exchange=exchange)
        head = load_head(config.model, model, device)
        return assemble(config, model, tokenizer, DeviceStreams(device), head=head, ranks=ranks)
    except BaseException as error:
        if ranks is None:
            raise
        why = ranks.why(error) if isinstance(error, StartupError) else error
        ranks.kill()
        raise why from error.__cause__


def assemble(
    config: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    streams: DeviceStreams,
    speculation: Speculation | None = None,
    head: LabelHead | None = None,
    ranks: Ranks | None = None,
) -> BuiltEngine:
    """An engine around a model that is loaded already. Benchmarks and tests bring an emulated one.

    `speculation`: instead of what the configuration says. `head`: of a checkpoint that judges. `ranks`: the processes
    that share the model with this one. Raises StartupError when pools do not fit into memory, the attention that will
    serve gives other logits than PyTorch's or treats codes in another way, or what is asked for cannot be.
    """
    config = _sized(with_host_memory(settled(config, streams.device)), streams.device, model.spec)
    spec, method = model.spec, config.speculation.method if speculation is None else "ngram"
    way = way_of(streams.device) if speculation is None else speculation.way
    attention = _build_attention(config, streams.device)
    reason = why_no_speculation(spec, way, method, type(attention))
    format = check_kv_format(config, spec, type(attention))
    _prove(config, model, attention, format, streams.device)
    source = None if speculation is not None else build_source(config, model, streams, reason)
    if speculation is not None and reason is not None:
        raise StartupError(f"speculation is not possible: {reason}")
    drafts = config.speculation.max_drafts if source is not None else 0 if speculation is None else speculation.most
    pools = build_pools(config, model, streams, drafts, None if source is None else source.keeps)
    _tell_size(ranks, pools)
    code, lanes = HostCode(), LaneRecorder()
    # Where streams do not work at once the host neither relays nor samples. It may guess.
    if source is not None or streams.at_once:
        code.fetch(config.model.native)
    if source is not None:
        speculation = build_speculation(config, source, pools, streams, spec, code)
    grammars = _build_grammars(config, model, tokenizer)
    inputs, embeddings = _build_inputs(config, spec, tokenizer, pools, head, getattr(model, "tower", None))
    # Captured and timed here and not by `new_executor`: it takes seconds, and that one is called on the event loop.
    at_build = captures(config) and streams.device.type == "cuda"
    build_runner = partial(_build_runner, config, model, streams, pools, lanes, speculation, code, head, ranks)
    runner = build_runner() if at_build or speculation is not None else None
    if runner is not None and speculation is not None and speculation.depth is None:
        depth = AdaptiveDepth(speculation.most, time_steps(runner.state, pools.memory.draft_room))
        speculation = dataclasses.replace(speculation, depth=depth)
    renewal = Renewal(config, streams, pools, code, Loaded(model, speculation, head))
    disagg = Disagg(config, facts_of(config, spec, pools))
    return BuiltEngine(
        config=config,
        inputs=inputs,
        embeddings=embeddings,
        adapters=pools.adapters.loader,
        grammars=grammars,
        model_info=disagg.told(_model_info(config, model, tokenizer, pools, grammars, inputs, embeddings.labelling)),
        new_executor=lambda wake: _build_executor(config, renewal.began(runner or build_runner()), ranks, wake),
        new_scheduler=partial(_build_scheduler, config, model.spec, streams, pools, lanes, speculation, disagg),
        renewal=renewal,
        disagg=disagg,
        disk=build_disk_cache(config, spec, pools),
        lanes=lanes,
        ranks=ranks,
    )


def _sized(config: EngineConfig, device: torch.device, spec: ModelSpec) -> EngineConfig:
    return dataclasses.replace(config, scheduler=sized(config.scheduler, device_bytes(device), spec))


def _prove(
    config: EngineConfig, model: Model, attention: AttentionBackend, format: KVFormat, device: torch.device
) -> None:
    prove_attention(model, attention)
    prove_codes(model, attention, format)
    prove_deterministic(config, model, attention, device)


def _tell_size(ranks: Ranks | None, pools: Pools) -> None:
    if ranks is not None:
        ranks.sized(pools)


def _build_inputs(
    config: EngineConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    pools: Pools,
    head: LabelHead | None,
    tower: Sees | None,
) -> tuple[InputProcessor, EmbeddingInputs]:
    inputs = InputProcessor(
        tokenizer,
        pools.memory,
        spec.vocab_size,
        pools.context_length,
        config.seed,
        pools.adapters.table,
        encoder_input(spec.encoder, pools.max_input_length),
        pools.max_input_length,
        answer_form(config.model.answer_form, tokenizer.template, tokenizer.response_template),
        image_inputs(config, spec, tokenizer, pools, tower),
        audio_inputs(config, spec),
    )
    labelling = labelling_of(config.model, spec, tokenizer, head)
    return inputs, EmbeddingInputs(
        inputs, pools.memory, spec.hidden_size, labelling, spec.token_types, spec.whole_prompts
    )


def _build_executor(
    config: EngineConfig, runner: StepRunner, ranks: Ranks | None, wake: Callable[[], None]
) -> StepExecutor:
    if not config.executor.overlap:
        return InlineExecutor(runner, wake)
    if isinstance(ranks, Peers):
        return ranks.executor(runner, wake)
    return PipelineThread(runner, runner, wake) if isinstance(runner, PipelineLeader) else ForwardThread(runner, wake)


def _build_runner(
    config: EngineConfig,
    model: Model,
    streams: DeviceStreams,
    pools: Pools,
    lanes: LaneRecorder,
    speculation: Speculation | None,
    code: HostCode,
    head: LabelHead | None,
    ranks: Ranks | None,
) -> StepRunner:
    checks = DeviceChecks(AssertMode(config.executor.assert_mode), streams.device)
    attention = _build_attention(config, streams.device)
    model.bind(pools.kv, attention, pools.companions)
    state = DeviceState(
        pool=pools.requests,
        kv_pool=pools.kv,
        future_map=FutureMap(pools.requests, streams, checks, () if speculation is None else speculation.columns),
        checks=checks,
        streams=streams,
        staging=Staging(streams.device),
        model=model,
        sampler=build_sampler(model.spec.vocab_size, streams.device),
        head=head,
        host=None if pools.host is None else build_arena(pools, streams),
        companions=pools.companions,
        attention=attention,
        verification=verification(speculation, ranks),
        graph_sizes=graph_sizes(config.memory.max_running_requests) if captures(config) else (),
        graph_tokens=chunk_tokens(config.scheduler.prompt_tokens) if captures(config) else (),
        lanes=lanes,
        host_code=code,
        share=None if ranks is None else ranks.share,
        alone=ranks is None,
    )
    return StepRunner(state) if ranks is None else ranks.runner(state)


def _build_attention(config: EngineConfig, device: torch.device) -> AttentionBackend:
    return build_attention(config.executor.attention_backend, device, config.model.deterministic)


def _build_scheduler(
    config: EngineConfig,
    spec: ModelSpec,
    streams: DeviceStreams,
    pools: Pools,
    lanes: LaneRecorder,
    speculation: Speculation | None,
    disagg: Disagg,
    executor: Executor,
    emit: Emit,
) -> Scheduler:
    host_cache = None
    if pools.host is not None:
        assert isinstance(executor, HostCopies), "both executors copy to host memory"
        host_cache = HostCache(*(pools.host, pools.memory, executor, disagg.giver, disagg.woken), takes=disagg.takes)
    return Scheduler(
        config.scheduler,
        pools.memory,
        executor,
        emit,
        max_len=pools.requests.max_context_len,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
        pin=Staging(streams.device).pinned,
        lanes=lanes,
        depth=None if speculation is None else speculation.depth,
        host_cache=host_cache,
        stages=config.model.pipeline_parallel if config.executor.overlap else 1,
    )


def _build_grammars(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> GrammarCompiler:
    backend, spec = tokenizer.backend, model.spec
    # Tokenizers written in Python have no form that the grammar libraries read.
    new = None if backend is None else partial(Vocabulary.of, backend, spec.vocab_size, spec.eos_token_ids)
    return GrammarCompiler(config.grammar, choose(config.grammar.backend), new)


def _pooling(config: EngineConfig, spec: ModelSpec) -> Pooling:
    """As the checkpoint says, else the mean for an encoder, whose last token is no better than any."""
    told = read_pooling(Path(config.model.path)) if config.model.path else None
    return told or (Pooling.MEAN if spec.whole_prompts else Pooling.LAST)


def _model_info(
    config: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    pools: Pools,
    grammars: GrammarCompiler,
    inputs: InputProcessor,
    labelling: Labelling | None,
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
        grammar_backend=grammars.backend or "",
        answer_form=inputs.answering.name,
        takes_images=inputs.images.sees,
        takes_audio=inputs.audio.hears,
        path=config.model.path,
        pooling=_pooling(config, spec),
        labels=None if labelling is None else labelling.labels,
        generates=not spec.whole_prompts and (labelling is None or labelling.head is None),
    )
