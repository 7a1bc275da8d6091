"""What an engine is put together to: limits of the model and of the configuration, whichever is lower."""

from __future__ import annotations

import dataclasses

import pytest

from core.config import ModelConfig
from core.engine import build
from core.engine.build import assemble
from core.errors import Unsupported
from core.memory.kv_pool import KVLayerSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.text.tokenizer import Tokenizer
from service.bench.emulated import EmulatedStreams
from tests.support.fakes.emulated_engine import emulated_config
from tests.unit.core.engine.emulation import HookedModel, running


@pytest.mark.parametrize(("asked", "served"), [(None, 4096), (100, 100), (9999, 4096)])
def test_the_context_is_the_models_unless_a_shorter_one_is_asked_for(
    tokenizer: Tokenizer, asked: int | None, served: int
) -> None:
    model = HookedModel(tokenizer)
    named = ModelConfig("emulated", context_length=asked, served_name="other")
    config = dataclasses.replace(emulated_config(rows=8), model=named)
    info = assemble(config, model, tokenizer, EmulatedStreams(model.timeline)).model_info
    assert (info.name, info.context_length, info.max_input_length) == ("other", served, served - 1)


async def test_no_prefix_of_an_encoder_decoder_is_kept(tokenizer: Tokenizer) -> None:
    """Its outputs depend on more than the tokens before them."""
    model = HookedModel(tokenizer)
    encoder = EncoderSpec(77, (KVLayerSpec(0, 1, 1, 1),), (1,))
    model.spec = dataclasses.replace(model.spec, encoder=encoder)
    async with running(tokenizer, model, prefix_cache="radix") as engine:
        with pytest.raises(Unsupported):
            engine.prefixes.watch("")
        assert engine.model_info.max_input_length == 77


@pytest.mark.parametrize(("asked", "tokens"), [(None, 8192), (48, 48)])
async def test_steps_are_sized_by_the_device_that_the_engine_is_for(
    tokenizer: Tokenizer, asked: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "device_bytes", lambda device: 139 << 30)
    model = HookedModel(tokenizer)
    config = emulated_config(rows=8)
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, chunked_prefill_size=asked))
    engine = await assemble(config, model, tokenizer, EmulatedStreams(model.timeline)).start()
    try:
        assert engine.stats.chunked_prefill_size == tokens
    finally:
        await engine.stop()
