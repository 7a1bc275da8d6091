"""The load-time check catches a model that is wrong in ways that raise nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import core.models.hf.packed_attention as packed_attention
from core.attention.span import AttentionSpan
from core.attention.torch_native import TorchNativeAttention
from core.errors import ModelLoadError
from core.models.hf.self_check import HALF_TOLERANCE, TABLE, TOLERANCE
from tests.unit.core.models.reference import load

Make = Callable[[str], Path]


def test_padding_is_never_given_to_a_row() -> None:
    pages = [{slot // 2 for slot in row if slot > 1} for row in TABLE[1:]]
    assert not pages[0] & pages[1]
    assert all(slot > 1 for row, length in zip(TABLE[1:], (8, 5)) for slot in row[:length])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["scale", "prefix", "value", "nan"])
def test_refuses_a_model_that_computes_something_else(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: str
) -> None:
    honest = TorchNativeAttention.forward

    def forward(self: TorchNativeAttention, layer_id: int, q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        if fault == "scale":
            options["scale"] *= 3.0
        if fault == "prefix":
            options["sliding_window"] = 1
        if fault == "value":
            v = v.flip(-1)
        out = honest(self, layer_id, q, k, v, **options)
        return out * torch.nan if fault == "nan" else out

    monkeypatch.setattr(TorchNativeAttention, "forward", forward)
    with pytest.raises(ModelLoadError, match=r"'llama'.*" + ("not finite" if fault == "nan" else "differ by")):
        load(checkpoint("llama"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refuses_when_only_the_prefix_is_lost(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Whole prefills would look right; only chunks and decode steps read the pool."""
    honest = TorchNativeAttention.plan

    def plan(self: TorchNativeAttention, batch: Any) -> None:
        batch.req_to_token = batch.req_to_token.roll(1, dims=0)
        honest(self, batch)

    monkeypatch.setattr(TorchNativeAttention, "plan", plan)
    with pytest.raises(ModelLoadError, match=r"'llama'.*differ by"):
        load(checkpoint("llama"), dtype)


def test_an_exception_on_the_way_is_one_line(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel\n  at line 3")

    monkeypatch.setattr(TorchNativeAttention, "forward", forward)
    with pytest.raises(ModelLoadError) as caught:
        load(checkpoint("llama"))
    assert caught.value.message == "model type 'llama' is not supported: no such kernel"


def test_tolerances_grow_with_rounding() -> None:
    assert TOLERANCE[torch.float64] < TOLERANCE[torch.float32] < HALF_TOLERANCE


def test_queries_and_keys_rotated_in_float32_reach_the_pool_in_its_dtype() -> None:
    class Recorder(TorchNativeAttention):
        def forward(self, layer_id: int, q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
            assert q.dtype == k.dtype == v.dtype == torch.bfloat16
            assert options["scale"] == 0.5
            return torch.zeros(q.shape[1], q.shape[0], v.shape[2], dtype=q.dtype)

    context = packed_attention.PackedContext(torch.bfloat16, {0: AttentionSpan()}, Recorder())
    module = torch.nn.Identity()
    packed_attention.bind_context(module, context)
    query, key = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    context.cache.update(key, key.bfloat16(), 0)
    out, weights = packed_attention.packed_attention(module, query, key, key.bfloat16(), None)
    assert (out.shape, out.dtype, weights) == ((1, 3, 2, 4), torch.bfloat16, None)


def test_facade_finds_the_layer_of_shared_and_changed_keys() -> None:
    cache = packed_attention.KVFacade()
    cache.begin(torch.arange(2))
    with pytest.raises(RuntimeError, match="never went through the cache"):
        cache.layer_of(torch.ones(1))
    first, second = torch.ones(1), torch.ones(1)
    assert cache.update(first, first, 3) == (first, first)
    assert cache.layer_of(first) == 3
    cache.update(second, second, 5)
    assert cache.layer_of(second) == 5
    assert cache.layer_of(first) == 3, "a layer that shares the keys of an earlier one"
    assert cache.layer_of(second.repeat(2)) == 5, "keys changed after the cache belong to the latest update"
    cache.begin(torch.arange(2))
    with pytest.raises(RuntimeError):
        cache.layer_of(first)
    assert cache.get_seq_length() == 0
    cache.begin(torch.tensor([7, 3, 4]))
    assert cache.get_seq_length(0).tolist() == [7, 2, 2]
    with pytest.raises(AttributeError, match="update_conv_state"):
        cache.update_conv_state(None)
