"""How large the pool of encoder outputs is, and what the ordinary pool leaves for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from core.config import EngineConfig, MemoryConfig, ModelConfig
from core.engine.build_pools import CrossSize, build_cross_pools, cross_size
from core.engine.encoder_input import encoder_input
from core.memory.kv_pool import KVLayerSpec
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import ModelSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.types.request import Req
from core.types.sampling_params import SamplingParams

LAYERS = (KVLayerSpec(0, 2, 4, 4), KVLayerSpec(1, 2, 4, 4))
EACH = 2 * 2 * (4 + 4) * 2
"""Bytes of an encoder token in both layers, in bfloat16."""
ENCODER = EncoderSpec(200, LAYERS, (2, 7), forced_first=(5,), forced_last=(1,))
SPEC = ModelSpec("m", "M", 320, 64, torch.bfloat16, LAYERS, encoder=ENCODER)


def config(context: int | None = None, encoder_tokens: int | None = None) -> EngineConfig:
    memory = MemoryConfig(page_size=16, max_encoder_tokens=encoder_tokens)
    return EngineConfig(ModelConfig("m", context_length=context), memory)


def test_encoder_tokens_are_charged_in_bytes_by_token_or_as_they_are_asked_for() -> None:
    assert cross_size(config(), dataclasses.replace(SPEC, encoder=None)) == CrossSize(0, 0, 0)
    assert cross_size(config(), SPEC) == CrossSize(200, EACH, 0)
    assert cross_size(config(encoder_tokens=160), SPEC) == CrossSize(200, 0, 160 * EACH)


def test_a_configured_context_bounds_the_input_too() -> None:
    assert [cross_size(config(context), SPEC).max_input for context in (None, 50, 5000)] == [200, 50, 200]


def test_there_are_as_many_pages_as_the_ordinary_pool_has_or_as_the_tokens_fill() -> None:
    for tokens, pages in ((None, 9), (160, 10), (175, 10)):
        asked = config(encoder_tokens=tokens)
        requests = ReqToTokenPool(3, 64, torch.device("cpu"))
        host, device = build_cross_pools(ENCODER, cross_size(asked, SPEC), asked.memory, 9, requests, SPEC.dtype)
        assert (host.allocator.num_pages, device.pool.num_pages) == (pages, pages)
        assert device.pool.dtype is SPEC.dtype and device.table.shape == (4, 200)


def test_what_a_client_sends_goes_to_the_encoder_and_the_decoder_begins_as_its_checkpoint_says() -> None:
    assert encoder_input(None, 0) is None
    sides = encoder_input(ENCODER, 200)
    assert sides is not None
    sent = np.array([30, 31, 32])
    req = Req("r", 0, params=SamplingParams(), seed=0, max_new_tokens=4, **sides.sides(sent))
    assert req.encoder_ids is sent and req.prompt.tolist() == [2, 7]
    assert (req.forced_first, req.forced_last) == ((5,), (1,))
