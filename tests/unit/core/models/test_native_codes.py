"""Compiled decoders over keys and values in eight bits: the bytes are those of the format, and logits those of modules.

Both read codes, so float32 differs by rounding alone. What a proof at load lets pass is looked at too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.config import ModelConfig
from core.memory import kv_int8
from core.memory.kv_int8 import INT8
from core.memory.kv_pool import KVPool
from core.models.base import Model
from core.models.hf.backend import TransformersModel
from core.models.hf.self_check import coded_reference, packed_steps, run_self_check, small_pool
from core.models.loader import load_model
from core.models.native import family
from core.models.native.decoder import NativeDecoder
from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
KINDS = ("llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "cohere2", "llama4_text", "qwen3_next", "mixtral")
"""Norms of heads, windows, caps, sinks, latents, chunks, states and experts."""


@pytest.fixture(scope="module")
def extension() -> Any:
    try:
        return load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


def loaded(directory: Path, dtype: str = "float32") -> TransformersModel:
    found = load_model(ModelConfig(str(directory), dtype=dtype, native="off"), CPU)
    assert isinstance(found, TransformersModel) and found.reference is not None
    return found


def run(model: Model, ids: Any) -> tuple[KVPool, list[torch.Tensor]]:
    pool = small_pool(model.spec, CPU, INT8)
    return pool, [logits.clone() for _, logits in packed_steps(model, ids, pool, TorchNativeAttention())]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_modules_that_read_the_same_codes(
    extension: Any, checkpoint_of: Callable[[str], Path], kind: str
) -> None:
    model = loaded(checkpoint_of(kind))
    assert model.reference is not None
    expected_pool, expected = run(model, model.reference.ids)
    decoder = NativeDecoder(extension, model.module, model.spec, 2)
    pool, found = run(decoder, model.reference.ids)
    scale = max(float(each.abs().max()) for each in expected)
    for want, got in zip(expected, found, strict=True):
        assert float((want - got).abs().max()) < 1e-4 * scale
    first = model.spec.kv_layers[0].layer_id
    for what in ("k", "v", "k_scales", "v_scales"):
        assert torch.equal(getattr(pool, what)(first), getattr(expected_pool, what)(first)), what


@pytest.mark.parametrize("head", [8, 48, 64, 80, 128, 256, 288])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_any_width_are_read(extension: Any, tmp_path: Path, head: int, dtype: str) -> None:
    """Codes are turned sixty-four at a time, then as many as words have room for, then one by one.

    Sums of more than 256 have no room in integers.
    """
    model = loaded(make_checkpoint("llama", tmp_path, head_dim=head), dtype)
    assert model.reference is not None
    coded = coded_reference(model, model.reference, INT8)
    decoder = NativeDecoder(extension, model.module, model.spec, 2)
    result = run_self_check(decoder, coded, format=INT8)
    assert result.passed and (dtype == "bfloat16" or result.error < 1e-4), result


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
def test_any_number_of_queries_reads_the_same_codes(extension: Any, tmp_path: Path, heads: int) -> None:
    """Rows are multiplied three at a time, and what is left of them."""
    sizes = {"hidden_size": 84, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 32}
    model = loaded(make_checkpoint("llama", tmp_path, **sizes), "bfloat16")
    assert model.reference is not None
    coded = coded_reference(model, model.reference, INT8)
    assert run_self_check(NativeDecoder(extension, model.module, model.spec, 2), coded, format=INT8).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_queries_that_are_no_numbers_give_none(
    extension: Any, checkpoint_of: Callable[[str], Path], dtype: str, odd: float
) -> None:
    model = loaded(checkpoint_of("llama"), dtype)
    assert model.reference is not None
    with torch.no_grad():
        layer: Any = model.module.model.layers[-1]
        layer.self_attn.q_proj.weight[:1] = odd
    _, logits = run(NativeDecoder(extension, model.module, model.spec, 2), model.reference.ids)
    assert not any(row.isfinite().any() for each in logits for row in each)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_proved_over_codes_when_it_is_made(
    checkpoint_of: Callable[[str], Path], kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that puts the scales of values where those of keys belong is not served, and the one that is right is."""
    config = ModelConfig(str(checkpoint_of(kind)), dtype=dtype, native="wait", kv_cache_dtype="int8")
    assert getattr(load_model(config, CPU), "native", False)
    bind = NativeDecoder.bind

    def wrongly(self: NativeDecoder, *given: Any) -> None:
        bind(self, *given)
        self._key_scales = self._value_scales

    monkeypatch.setattr(NativeDecoder, "bind", wrongly)
    assert not getattr(load_model(config, CPU), "native", True)


def test_a_reference_over_codes_is_not_that_of_numbers(checkpoint_of: Callable[[str], Path]) -> None:
    model = loaded(checkpoint_of("llama"))
    assert model.reference is not None
    coded = coded_reference(model, model.reference, INT8)
    assert all(a.shape == b.shape for a, b in zip(coded.expected, model.reference.expected, strict=True))
    assert not run_self_check(model, coded).passed, "codes show"
    assert run_self_check(model, coded, format=INT8).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_holds_no_number_fails_its_row_and_no_other(
    extension: Any, checkpoint_of: Callable[[str], Path], dtype: torch.dtype
) -> None:
    model = loaded(checkpoint_of("llama"), str(dtype).removeprefix("torch."))
    assert model.reference is not None
    decoder = NativeDecoder(extension, model.module, model.spec, 2)
    pool = small_pool(model.spec, CPU, INT8)
    steps = packed_steps(decoder, model.reference.ids, pool, TorchNativeAttention())
    next(steps)
    for layer in model.spec.kv_layers:
        scales = pool.v_scales(layer.layer_id)
        assert scales is not None
        # The slots of the first three tokens of the first row (`self_check.TABLE`).
        scales[[6, 7, 12]] = kv_int8.NO_NUMBER
    for parts, logits in steps:
        for (row, _, count), found in zip(parts, logits.split([each[2] for each in parts]), strict=True):
            assert found.isfinite().all() == (row == 2), (row, count)


def test_other_codes_are_left_to_modules(checkpoint_of: Callable[[str], Path]) -> None:
    assert "fp8_e4m3" not in family.STORED
    made = load_model(ModelConfig(str(checkpoint_of("llama")), kv_cache_dtype="fp8_e4m3", native="wait"), CPU)
    assert isinstance(made, TransformersModel)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 3.4e38])
def test_bytes_of_what_is_no_number(extension: Any, checkpoint_of: Callable[[str], Path], odd: float) -> None:
    """Compiled code leaves what the format says of such a head: zeros, and a scale that is none."""
    model = loaded(checkpoint_of("llama"))
    assert model.reference is not None
    with torch.no_grad():
        layer: Any = model.module.model.layers[0]
        layer.self_attn.v_proj.weight[:4] = odd
    decoder = NativeDecoder(extension, model.module, model.spec, 2)
    pool, _ = run(decoder, model.reference.ids)
    codes, scales = pool.v(0), pool.v_scales(0)
    assert scales is not None
    written = scales[:, 0] != 0
    assert written.any() and (scales[written, 0] == kv_int8.NO_NUMBER).all() and not codes[written, 0].any()
    assert (scales[written, 1] != kv_int8.NO_NUMBER).all()
