"""Sizes and builds the cross pages of an encoder-decoder; nothing of it exists for other models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.config import EngineConfig, MemoryConfig
from core.memory.cross.cross_pages import CrossPages
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import ModelSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec


@dataclass(frozen=True, slots=True)
class CrossSize:
    """What the KV pool must leave of the memory that both share."""

    max_input: int = 0
    """The longest input in tokens, 0 without an encoder."""
    bytes_per_token: int = 0
    """Of cross pages for each decoder token, where both pools get the same number of pages."""
    reserved_bytes: int = 0
    """Of cross pages that the configuration asks for."""


def cross_size(config: EngineConfig, spec: ModelSpec) -> CrossSize:
    """A configured context length bounds both sides."""
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
    """Host and device side; as many pages as the KV pool has, unless the configuration says otherwise."""
    asked = memory.max_encoder_tokens
    pages = kv_pages if asked is None else asked // memory.page_size
    host = CrossPages(pages, memory.page_size, requests.num_rows)
    pool = KVPool(encoder.cross_layers, pages, memory.page_size, dtype, requests.device)
    return host, CrossPool(requests, pool, size.max_input)
