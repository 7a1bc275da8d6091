"""Facts of model and server, and the server's load, as messages."""

from __future__ import annotations

import dataclasses
from typing import Any

from core.engine.api import EngineState
from core.types.io import ModelInfo
from core.types.labels import Activation
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats
from service.config.server_config import ServerConfig
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.control import ACTIVITIES
from service.wire.embed import POOLINGS
from service.wire.generate import duration

_STATES = {
    EngineState.STARTING: pb.SERVER_STATE_STARTING,
    EngineState.READY: pb.SERVER_STATE_READY,
    EngineState.DRAINING: pb.SERVER_STATE_DRAINING,
    EngineState.STOPPED: pb.SERVER_STATE_STOPPED,
    EngineState.DEAD: pb.SERVER_STATE_DEAD,
}

_ACTIVATIONS = {
    Activation.SOFTMAX: pb.ACTIVATION_SOFTMAX,
    Activation.SIGMOID: pb.ACTIVATION_SIGMOID,
    Activation.NONE: pb.ACTIVATION_NONE,
}

_DEFAULTS = {pooling: number for number, pooling in POOLINGS.items()}


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """`params` with every field set that has a value."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return pb.SamplingParams(**{name: value for name, value in given.items() if value is not None})


def model_info_response(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Facts of the served model."""
    return pb.GetModelInfoResponse(
        name=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        max_input_length=info.max_input_length,
        bos_token_id=info.bos_token_id,
        eos_token_ids=info.eos_token_ids,
        default_sampling_params=sampling_message(info.default_sampling),
        has_chat_template=info.has_chat_template,
        quantization=info.quantization,
        embedding_dimension=info.embedding_dimension or None,
        grammar_backend=info.grammar_backend,
        no_generation=not info.generates,
        answer_form=info.answer_form,
        takes_images=info.takes_images,
        takes_audio=info.takes_audio,
        default_pooling=_DEFAULTS[info.pooling] if info.embedding_dimension else None,
        **_label_facts(info),
    )


def _label_facts(info: ModelInfo) -> dict[str, Any]:
    labels = info.labels
    if labels is None:
        return {}
    return {
        "labels": labels.names,
        "activation": _ACTIVATIONS[labels.activation],
        "relevance_label": labels.relevance,
    }


def own_load_response(running: int, waiting: int) -> pb.GetLoadResponse:
    """The load of one tenant: its own requests, and no figure that other tenants have a part in."""
    return pb.GetLoadResponse(running_requests=running, waiting_requests=waiting, live_requests=running + waiting)


def load_response(stats: EngineStats, live_requests: int, token_usage: float) -> pb.GetLoadResponse:
    """The load as of `stats`; `token_usage` is the used share of the KV pool, 0 to 1."""
    return pb.GetLoadResponse(
        running_requests=stats.running,
        waiting_requests=stats.waiting,
        live_requests=live_requests,
        pools=[
            pb.PoolLoad(name=pool.name, capacity=pool.capacity, used=pool.used, cached=pool.cached)
            for pool in stats.pools
        ],
        token_usage=token_usage,
        device_idle_ratio=stats.device_idle_ratio,
        step=stats.step,
    )


def server_info_response(
    config: ServerConfig, version: str, state: EngineState, uptime: float, stats: EngineStats | None
) -> pb.GetServerInfoResponse:
    """Facts of the server process; `uptime` in seconds. `stats`: None before there is an engine."""
    limit = config.max_request_seconds
    return pb.GetServerInfoResponse(
        version=version,
        state=_STATES[state],
        uptime=duration(uptime),
        max_running_requests=config.max_running,
        max_queued_requests=config.max_queued,
        max_concurrent_requests=config.concurrency_limit,
        max_request_duration=None if limit is None else duration(limit),
        max_receive_bytes=config.max_receive_bytes,
        page_size=config.engine.memory.page_size,
        overlap=config.engine.executor.overlap,
        prefix_cache=config.engine.memory.prefix_cache,
        schedule_policy=config.engine.scheduler.policy,
        resume_window=duration(config.resume_seconds) if config.resume_seconds else None,
        weight_version="" if stats is None else stats.weight_version,
        activity=pb.SERVER_ACTIVITY_UNSPECIFIED if stats is None else ACTIVITIES[stats.activity],
    )
