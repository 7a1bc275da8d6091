"""Keys and values as codes: every number as near as eight bits allow, whatever its size, and twice as many tokens."""

from __future__ import annotations

import pytest
import torch

from core.config import MemoryConfig
from core.memory.kv_e4m3 import FP8_E4M3, decode, encode
from core.memory.kv_format import PLAIN
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.sizing import num_pages
from core.model_config import KV_CACHE_DTYPES

CPU = torch.device("cpu")
LAYERS = (KVLayerSpec(0, 2, 16, 16), KVLayerSpec(3, 1, 24, 16, v_in_k=True))


def test_configuration_and_registry_name_the_same_formats() -> None:
    assert tuple(KV_FORMATS) == KV_CACHE_DTYPES


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 300.0, 1e6, 1e30])
def test_heads_of_any_size_are_rounded_to_four_digits(size: float) -> None:
    """By a sixteenth of a number at most, and not below 2^-16 of the head's largest."""
    values = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)) * size
    found = decode(*encode(values), torch.float32)
    allowed = values.abs() / 16 + values.abs().amax(-1, keepdim=True) * 2.0**-16
    assert ((found - values).abs() <= allowed).all()


def test_a_heads_size_says_nothing_of_another() -> None:
    values = torch.stack([torch.full((8,), 1e-4), torch.full((8,), 1e4)])[None]
    torch.testing.assert_close(decode(*encode(values), torch.float32), values, rtol=1 / 16, atol=0)


def test_what_is_rounded_once_stays_as_it_is() -> None:
    once = decode(*encode(torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(1))), torch.float32)
    again = decode(*encode(once), torch.float32)
    assert ((again - once).abs() <= once.abs().amax(-1, keepdim=True) * 2.0**-16).all()


def test_numbers_that_bfloat16_has_come_back_the_same_in_it() -> None:
    codes, exponents = encode(torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(decode(codes, exponents, torch.bfloat16).float(), decode(codes, exponents, torch.float32))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(odd: float) -> None:
    values = torch.ones(1, 2, 8)
    values[0, 1, 3] = odd
    found = decode(*encode(values), torch.float32)
    assert found[0, 1, 3].isnan()
    assert found.isnan().sum() == 1
    assert torch.equal(found[0, 0], values[0, 0])


def pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(LAYERS, 5, 4, dtype, CPU, format=FP8_E4M3)


def read(of: KVPool, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ks, vs = of.k_scales(layer), of.v_scales(layer)
    assert ks is not None and vs is not None
    return (
        decode(of.k(layer)[slots], ks[slots], of.dtype),
        decode(of.v(layer)[slots], vs[slots], of.dtype),
    )


def test_a_pool_of_codes_writes_its_slots_and_no_others() -> None:
    of, slots = pool(), torch.tensor([17, 4, 9])
    keys, values = torch.randn(3, 2, 16), torch.randn(3, 2, 16) * 1e-3
    of.write(0, slots, keys, values)
    k, v = read(of, 0, slots)
    torch.testing.assert_close(k, keys, rtol=1 / 16, atol=1e-4)
    torch.testing.assert_close(v, values, rtol=1 / 16, atol=1e-7)
    others = torch.tensor([slot for slot in range(of.num_slots) if slot not in (17, 4, 9)])
    assert not torch.stack(read(of, 0, others)).any(), "what was never written reads as zeros"
    assert not read(of, 3, slots)[0].any()


def test_values_within_keys_share_their_scales() -> None:
    of = pool()
    keys = torch.randn(2, 1, 24)
    of.write(3, torch.tensor([5, 6]), keys, keys[..., :16])
    k, v = read(of, 3, torch.tensor([5, 6]))
    assert torch.equal(k[..., :16], v)
    assert of.k_scales(3) is of.v_scales(3)


def test_padded_rows_write_slot_0_and_nothing_else() -> None:
    of = pool()
    of.write(0, torch.tensor([0, 0]), torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    assert not of.k(0)[1:].any()
    scales = of.k_scales(0)
    assert scales is not None and not scales[1:].any()


def test_sizes_count_codes_and_scales() -> None:
    assert pool().bytes_per_token == (2 * 32 + 4) + (24 + 1)
    assert pool().nbytes == sum(
        each.numel() * each.element_size()
        for of in [pool()]
        for each in (of.k(0), of.v(0), of.k(3), of.k_scales(0), of.v_scales(0), of.k_scales(3))
        if each is not None
    )


@pytest.mark.parametrize(("head_dim", "least"), [(64, 1.96), (128, 1.98)])
def test_the_same_memory_holds_twice_as_many_tokens(
    head_dim: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.memory.sizing.free_bytes", lambda *_: 1 << 30)
    layers = [KVLayerSpec(number, 8, head_dim, head_dim) for number in range(32)]
    plain, coded = (
        num_pages(MemoryConfig(), KVPool.bytes_per_token_for(layers, torch.bfloat16, each), 1 << 20, CPU)
        for each in (PLAIN, FP8_E4M3)
    )
    assert coded >= least * plain
