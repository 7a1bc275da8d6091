"""The KV pool stores what it is given, where it is told, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from core.memory.kv_pool import KVLayerSpec, KVPool

CPU = torch.device("cpu")
LAYERS = (KVLayerSpec(0, 2, 4, 4), KVLayerSpec(3, 1, 6, 2))


def make_pool(page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(LAYERS, num_pages=5, page_size=page_size, dtype=dtype, device=CPU)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_has_one_page_more_than_asked_and_starts_at_zero(page_size: int) -> None:
    pool = make_pool(page_size)
    assert pool.num_slots == 6 * page_size
    for spec in LAYERS:
        assert pool.k(spec.layer_id).shape == (6 * page_size, spec.num_kv_heads, spec.k_dim)
        assert pool.v(spec.layer_id).shape == (6 * page_size, spec.num_kv_heads, spec.v_dim)
        assert not pool.k(spec.layer_id).any()
        assert not pool.v(spec.layer_id).any()


def test_write_touches_its_slots_in_its_layer_only() -> None:
    pool = make_pool()
    slots = torch.tensor([17, 4, 9])
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    pool.write(0, slots, keys, values)
    assert torch.equal(pool.k(0)[slots], keys)
    assert torch.equal(pool.v(0)[slots], values)
    untouched = [s for s in range(pool.num_slots) if s not in (17, 4, 9)]
    assert not pool.k(0)[untouched].any()
    assert not pool.v(0)[untouched].any()
    assert not pool.k(3).any()


def test_write_takes_head_major_views_and_narrow_values() -> None:
    pool = make_pool()
    keys, values = torch.randn(1, 2, 6), torch.randn(1, 2, 2)
    pool.write(3, torch.tensor([5, 6]), keys.transpose(0, 1), values.transpose(0, 1))
    assert torch.equal(pool.k(3)[5:7], keys.transpose(0, 1))
    assert torch.equal(pool.v(3)[5:7], values.transpose(0, 1))


def test_padded_rows_dump_into_page_zero() -> None:
    pool = make_pool()
    pool.write(0, torch.tensor([0, 0, 20]), torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    assert not pool.k(0)[1:20].any()
    assert pool.k(0)[20].all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_sizes_count_every_layer_and_the_padding_page(dtype: torch.dtype, size: int) -> None:
    pool = make_pool(dtype=dtype)
    assert pool.bytes_per_token == (2 * 8 + 8) * size
    assert KVPool.bytes_per_token_for(LAYERS, dtype) == pool.bytes_per_token
    held = sum(t.nbytes for spec in LAYERS for t in (pool.k(spec.layer_id), pool.v(spec.layer_id)))
    assert pool.nbytes == held


def test_values_that_are_the_beginnings_of_their_keys_are_held_once() -> None:
    """As the latents of DeepSeek: what a pool is sized by is what it takes."""
    latent = KVLayerSpec(0, 1, 6, 4, v_in_k=True)
    pool = KVPool((latent, KVLayerSpec(1, 1, 6, 4)), 5, 4, torch.float32, CPU)
    assert pool.bytes_per_token == (6 + 6 + 4) * 4
    assert pool.v(0).data_ptr() == pool.k(0).data_ptr() and pool.v_in_k(0) and not pool.v_in_k(1)
    keys = torch.randn(2, 1, 6)
    pool.write(0, torch.tensor([9, 4]), keys, keys[..., :4])
    assert torch.equal(pool.v(0)[[9, 4]], keys[..., :4]) and torch.equal(pool.k(0)[[9, 4]], keys)


def test_refuses_what_cannot_be_stored() -> None:
    pool = make_pool()
    with pytest.raises(AssertionError):
        pool.write(0, torch.tensor([4], dtype=torch.int32), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    with pytest.raises(AssertionError):
        pool.write(0, torch.tensor([4]), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    with pytest.raises(AssertionError):
        pool.write(0, torch.tensor([4, 5]), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    with pytest.raises(AssertionError):
        pool.write(0, torch.tensor([4]), torch.ones(1, 2, 4, dtype=torch.bfloat16), torch.ones(1, 2, 4))
    with pytest.raises(KeyError):
        pool.k(1)
    with pytest.raises(AssertionError):
        KVPool((KVLayerSpec(0, 1, 1, 1), KVLayerSpec(0, 1, 1, 1)), 1, 1, torch.float32, CPU)


def test_a_model_without_attention_has_pages_of_no_bytes() -> None:
    assert KVPool((), 4, 2, torch.float32, CPU).nbytes == 0
