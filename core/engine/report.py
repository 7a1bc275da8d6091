"""What serving a checkpoint here would mean, found by doing all of it but the serving: loading, proving, sizing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.bandwidth import read_bandwidth
from core.device.streams import DeviceStreams, resolve_device
from core.engine.build_pools import build_pools
from core.engine.determinism import prove_deterministic, settled
from core.engine.labelling import labelling_of
from core.engine.math_threads import use_threads
from core.errors import ModelLoadError
from core.machine import available_memory
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVPool
from core.memory.recurrent.state_pool import MambaPool
from core.models.loader import check_checkpoint, load_head, load_model, served_by
from core.models.weights import check_weight_files
from core.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]

EMBEDDINGS: Final = ("embed_tokens.", "wte.", "word_embeddings.", "embeddings.weight", "tok_embeddings.", "embed_in.")
"""Parts of the names of embeddings, of which a token reads one row."""
HEADS: Final = ("lm_head.", "embed_out.", "output.weight")
QUANTISED_BYTES: Final = {"int8": 1.0, "int4": 0.53, "fp8": 1.0}
"""Bytes of a weight that is quantised at load, scales included."""
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Bytes, and tokens per second, of one checkpoint on this machine."""

    name: str
    architecture: str
    dtype: str
    quantization: str
    device: str
    served_by: str
    remarks: tuple[str, ...]
    """What the load said of how the model is served, and why not otherwise."""
    context_length: int
    weight_bytes: int
    """Of all weights, as they are served."""
    read_bytes: int
    """Of those that one token reads: experts that were not chosen and other rows of the embedding are left out."""
    kv_bytes_per_token: int
    state_bytes: int
    """Of the recurrent states of one request."""
    tokens: int
    """Tokens that the KV pool holds, all requests together."""
    bandwidth: float
    """Bytes per second that this device reads."""
    labels: tuple[str, ...] = ()
    """Of the checkpoint's classification head, or tokens named as labels."""
    generates: bool = True
    """Whether it puts out text; what does not reads each text in one step, or few."""

    @property
    def tokens_per_second(self) -> float:
        """The most that one request can get: each token reads its weights once."""
        return self.bandwidth / max(1, self.read_bytes)


def report(config: EngineConfig, progress: Progress | None = None) -> ModelReport:
    """Load and prove the checkpoint of `config`, and size its pools. Raises StartupError, as `build_engine` does.

    Raises ModelLoadError before anything is loaded if the weights cannot fit into the memory that is free.
    """
    device = resolve_device(config.executor.device)
    config = settled(config, device)
    use_threads(config)
    weight_bytes, read_bytes = _weights(config, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if weight_bytes > free:
        raise ModelLoadError(
            f"its weights take {weight_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free"
        )
    native = "wait" if config.model.native == "auto" else config.model.native
    with _remarks() as remarks:
        model = load_model(replace(config.model, native=native), device, progress)
        if config.model.deterministic:
            attention = build_attention(config.executor.attention_backend, device, invariant=True)
            prove_deterministic(config, model, attention, device)
    pools, spec = build_pools(config, model, DeviceStreams(device)), model.spec
    head = load_head(config.model, model, device)
    labelling = labelling_of(config.model, spec, Tokenizer.load(config.model.path), head)
    return ModelReport(
        name=config.model.served_name or spec.name,
        architecture=spec.architecture,
        dtype=str(spec.dtype).removeprefix("torch."),
        quantization=spec.quantization,
        device=str(device),
        served_by=served_by(model),
        remarks=tuple(remarks),
        context_length=pools.context_length,
        weight_bytes=weight_bytes,
        read_bytes=read_bytes,
        kv_bytes_per_token=KVPool.bytes_per_token_for(
            spec.kv_layers, spec.dtype, KV_FORMATS[config.model.kv_cache_dtype]
        ),
        state_bytes=MambaPool.bytes_per_slot(spec.state_layers),
        tokens=pools.kv.num_slots - config.memory.page_size,
        bandwidth=read_bandwidth(device),
        labels=() if labelling is None else labelling.labels.names,
        generates=not spec.whole_prompts and head is None,
    )


def _weights(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Bytes of all weights as they are served, and of those that one token reads. Raises ModelLoadError."""
    checkpoint = check_checkpoint(config.model.path)
    stored = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    nested = stored.get("text_config")
    text = {**stored, **nested} if isinstance(nested, dict) else stored
    wanted = config.model.dtype
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else checkpoint.dtype or "bfloat16"
    before = ITEM_BYTES.get(checkpoint.dtype or "", 4)
    scale = 1.0 if checkpoint.quantization is not None else ITEM_BYTES[wanted] / before
    packed = QUANTISED_BYTES.get(config.model.quantization)
    tensors = check_weight_files(checkpoint.path).tensors
    has_head = any(_is(name, HEADS) for name in tensors)
    share, total, read = _chosen_share(text), 0.0, 0.0
    for name, size in tensors.items():
        is_embedding = _is(name, EMBEDDINGS)
        held = size * scale if packed is None or is_embedding else size / before * packed
        total += held
        if not (is_embedding and has_head):
            read += held * (share if ".experts." in name else 1.0)
    return int(total), int(read)


def _is(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def _chosen_share(text: Mapping[str, Any]) -> float:
    """Which part of the experts a token goes through."""
    of = next((text[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if text.get(key)), 0)
    chosen = next((text[key] for key in ("num_experts_per_tok", "moe_topk", "moe_k") if text.get(key)), 0)
    return min(1.0, chosen / of) if isinstance(of, int) and isinstance(chosen, int) and of and chosen else 1.0


@contextmanager
def _remarks() -> Iterator[list[str]]:
    """What `core.models` logs inside the block."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("core.models"), Kept(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
