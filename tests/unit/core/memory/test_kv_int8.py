"""Keys and values as integers of eight bits: half a step off at most, heads apart, and no number stays none."""

from __future__ import annotations

import pytest
import torch

from core.memory.kv_int8 import INT8, MOST, decode, encode
from core.memory.kv_pool import KVLayerSpec, KVPool

CPU = torch.device("cpu")
HALF_A_STEP = 0.5 / 63.75
"""Of a head's largest number: that one is a code of 63.75 at least."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 300.0, 1e6, 1e30])
def test_a_number_is_off_by_half_a_step_at_most(size: float) -> None:
    values = drawn(64, 3, 32) * size
    codes, exponents = encode(values)
    largest = values.abs().amax(-1, keepdim=True)
    assert ((decode(codes, exponents, torch.float32) - values).abs() <= largest * HALF_A_STEP).all()
    assert int(codes.abs().amax()) <= MOST and int(codes.abs().amax(-1).amin()) >= 64, "the range is used"


@pytest.mark.parametrize("largest", [127.0, 127.4, 127.5, 127.6, 128.0, 254.9, 255.0, 255.1])
def test_the_largest_number_is_never_cut_off(largest: float) -> None:
    """Around the ends of the codes, where the power of two changes."""
    values = torch.tensor([[largest, -largest, largest / 3, 0.0]])
    codes, exponents = encode(values)
    assert ((decode(codes, exponents, torch.float32) - values).abs() <= 2.0 ** (exponents.item() - 127) / 2).all()


def test_a_heads_size_says_nothing_of_another() -> None:
    values = torch.stack([drawn(8) * 1e-4, drawn(8) * 1e4])[None]
    apart = [decode(*encode(head), torch.float32) for head in values[0]]
    assert torch.equal(decode(*encode(values), torch.float32)[0], torch.stack(apart))


def test_what_is_rounded_once_stays_as_it_is() -> None:
    once = decode(*encode(drawn(64, 3, 32, seed=1)), torch.float32)
    assert torch.equal(decode(*encode(once), torch.float32), once)


def test_numbers_come_back_the_same_in_bfloat16() -> None:
    codes, exponents = encode(drawn(8, 2, 16, seed=2))
    assert torch.equal(decode(codes, exponents, torch.bfloat16).float(), decode(codes, exponents, torch.float32))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_head_with_what_is_no_number_is_none_and_others_are(odd: float) -> None:
    """The last is a number that has no room for its largest step."""
    values = torch.ones(1, 2, 8)
    values[0, 1, 3] = odd
    found = decode(*encode(values), torch.float32)
    assert found[0, 1].isnan().all()
    assert torch.equal(found[0, 0], values[0, 0])


def test_zeros_and_slots_never_written_are_zeros() -> None:
    assert not decode(*encode(torch.zeros(2, 8)), torch.float32).any()
    assert not decode(torch.full((2, 8), 5, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8), torch.float32).any()


def test_a_pool_writes_its_slots_and_no_others() -> None:
    layers = (KVLayerSpec(0, 2, 16, 16), KVLayerSpec(3, 1, 24, 16, v_in_k=True))
    pool, slots = KVPool(layers, 5, 4, torch.float32, CPU, format=INT8), torch.tensor([17, 4, 9])
    keys, values = drawn(3, 2, 16), drawn(3, 2, 16, seed=3) * 1e-3
    pool.write(0, slots, keys, values)
    latents = drawn(3, 1, 24, seed=4)
    pool.write(3, slots, latents, latents[..., :16])
    for found, scales, wanted in (
        (pool.k(0), pool.k_scales(0), keys),
        (pool.v(0), pool.v_scales(0), values),
        (pool.k(3), pool.k_scales(3), latents),
        (pool.v(3), pool.v_scales(3), decode(*encode(latents), torch.float32)[..., :16]),
    ):
        assert scales is not None and found.dtype is torch.int8
        step = wanted.abs().amax(-1, keepdim=True) * HALF_A_STEP
        assert ((decode(found[slots], scales[slots], torch.float32) - wanted).abs() <= 2 * step).all()
        others = torch.tensor([slot for slot in range(pool.num_slots) if slot not in (17, 4, 9)])
        assert not found[others].any() and not scales[others].any()
    assert pool.bytes_per_token == (2 * 32 + 4) + (24 + 1)
