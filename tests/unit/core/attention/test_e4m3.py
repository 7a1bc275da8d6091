"""Eight-bit floats by arithmetic on bits are those of PyTorch, all of them, and so are rows that are rounded to them.

What is marked `interpreted` runs in the process of `test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.models.quantized.fp8 import FP8, LARGEST, SMALLEST_SCALE, round_rows
from tests.unit.core.attention.test_conformance import DEVICE
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.attention.test_triton_compiles import INTERPRETED, assembled, compiled

CODES = torch.arange(256, dtype=torch.uint8)


def kernels() -> tuple[Any, Any]:
    """What encodes and what decodes a tensor of one block."""
    import triton
    import triton.language as tl

    from core.attention.triton import e4m3

    encode, decode = e4m3.encode, e4m3.decode

    @triton.jit
    def encoding(values, out, BLOCK: tl.constexpr) -> None:
        places = tl.arange(0, BLOCK)
        tl.store(out + places, encode(tl.load(values + places)))

    @triton.jit
    def decoding(codes, out, BLOCK: tl.constexpr) -> None:
        places = tl.arange(0, BLOCK)
        tl.store(out + places, decode(tl.load(codes + places)))

    # A kernel finds by their names what it calls.
    for each in (encoding, decoding):
        each.fn.__globals__.update(encode=encode, decode=decode, tl=tl)
    return encoding, decoding


def hard_values() -> torch.Tensor:
    """4,096 numbers: all that there are, halfway between, beside those, and others."""
    numbers = CODES.view(FP8).float()
    exact = numbers[numbers.isfinite()].unique()
    halfway = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(way)) for way in (float("inf"), -float("inf"))]
    odd = torch.tensor([float("nan"), 0.0, -0.0, 1e-40, -1e-40, LARGEST, -LARGEST])
    some = torch.cat([exact, halfway, *beside, odd])
    rest = torch.randn(4096 - len(some), generator=torch.Generator().manual_seed(0))
    rest *= torch.logspace(-4, 3, len(rest))
    return torch.cat([some, rest]).clamp(-LARGEST, LARGEST)


@interpreted
def test_interpreted_codes_are_those_of_pytorch() -> None:
    values = hard_values().to(DEVICE)
    out = torch.empty(len(values), dtype=torch.uint8, device=DEVICE)
    kernels()[0][(1,)](values, out, BLOCK=len(values))
    expected = values.cpu().to(FP8).view(torch.uint8)
    # The sign of what is no number says nothing.
    expected[values.cpu().isnan()] &= 0x7F
    out[values.isnan()] &= 0x7F
    assert torch.equal(out.cpu(), expected)


@interpreted
def test_interpreted_numbers_are_those_of_pytorch() -> None:
    out = torch.empty(256, dtype=torch.float16, device=DEVICE)
    kernels()[1][(1,)](CODES.to(DEVICE), out, BLOCK=256)
    torch.testing.assert_close(out.cpu(), CODES.view(FP8).half(), atol=0, rtol=0, equal_nan=True)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interpreted_rows_are_rounded_as_by_operations_on_tensors(dtype: torch.dtype) -> None:
    from core.models.fused.fp8_rows import BLOCK, round_rows_at_once

    rows = torch.randn(6, BLOCK + 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows *= torch.tensor([1, 1e-3, 1e4, 0, 1e-30, 1])[:, None].to(dtype)
    rows[5, BLOCK + 7] = float("nan")
    (values, scales), (plain, by_row) = round_rows_at_once(rows.to(DEVICE), LARGEST, SMALLEST_SCALE), round_rows(rows)
    assert torch.equal(scales.cpu()[:5], by_row[:5])
    assert torch.equal(values.cpu()[:5].view(torch.uint8), plain[:5].view(torch.uint8))
    assert values[5].float().isnan().sum() == 1, "what is no number stays none, and fails its row"


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interpreted_stores_leave_the_bytes_of_operations_on_tensors(dtype: torch.dtype) -> None:
    from core.attention.triton.store import store_kv
    from core.memory.kv_e4m3 import encode

    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 5, width, generator=generator).to(dtype) for width in (24, 10))
    k *= torch.logspace(-25, 25, 5, dtype=dtype)[None, :, None]
    k[0, 2, 3], v[1, 1, 1] = float("nan"), float("inf")
    slots = torch.tensor([3, 1, 8, 5, 2])
    stored = [torch.zeros(9, 2, width, dtype=torch.uint8, device=DEVICE) for width in (24, 10)]
    scales = [torch.zeros(9, 2, dtype=torch.uint8, device=DEVICE) for _ in stored]
    store_kv(*stored, k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), True, *scales)
    for got, by, numbers in zip(stored, scales, (k, v), strict=True):
        codes, exponents = encode(numbers.transpose(0, 1))
        # The sign of what is no number says nothing.
        nothing = (codes & 0x7F) == 0x7F
        assert torch.equal(by.cpu()[slots], exponents)
        assert torch.equal((got.cpu()[slots] & 0x7F) == 0x7F, nothing)
        assert torch.equal(got.cpu()[slots][~nothing], codes[~nothing])
        assert not got.cpu()[0].any() and not by.cpu()[0].any(), "no other slot is written"


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_rows_are_rounded_by_a_kernel_that_fits(capability: int) -> None:
    from core.models.fused import fp8_rows

    kinds = {"rows": "*bf16", "out": "*u8", "scales": "*fp32"}
    constants = {"WIDTH": 14336, "BLOCK": fp8_rows.BLOCK, "LARGEST": LARGEST, "LEAST": SMALLEST_SCALE}
    kernel = compiled(fp8_rows._round_row, kinds, constants, capability)
    assert kernel.asm["cubin"] and assembled(kernel, capability, r"(\d+) bytes spill stores") == 0
