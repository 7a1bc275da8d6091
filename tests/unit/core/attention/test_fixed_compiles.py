"""The kernels of deterministic engines compile for GPUs that are not at hand, and fit there, as all others do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.attention.test_conformance import INTERPRETED
from tests.unit.core.attention.test_triton_compiles import (
    LAYERS,
    PAGED,
    PARTS,
    TRITON,
    compiled,
    constants_of,
    fits,
    stored,
    tiles_of,
)

pytestmark = [
    pytest.mark.skipif(not TRITON, reason="triton is not installed (slipstream[cuda])"),
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
]
HELD = [name for name, layer in LAYERS.items() if not layer.farthest]


@pytest.mark.parametrize("split", [False, True], ids=["one program", "parts"])
@pytest.mark.parametrize("name", HELD)
def test_attention_compiles_and_fits(name: str, split: bool) -> None:
    from core.attention.triton import fixed
    from core.attention.triton.fixed_backend import fixed_tile

    layer = LAYERS[name]
    segments, longest = (2, 1) if split else (1, 8192)
    tile = fixed_tile(tiles_of(layer), longest, segments, layer.heads, layer.kv_heads, 32768, layer.v_dim)
    assert (tile.parts > 1) == split, "that both ways are compiled here"
    data = f"*{layer.dtype}"
    constants = constants_of(layer, tile.block_n) | {"SUNK": layer.special, "SPLIT": split, "SEARCHED": 0}
    constants |= {"BLOCK_M": tile.block_m, "PART": tile.part}
    pointers = PAGED | stored(layer) | dict.fromkeys(("starts", "prefixes"), "*i64")
    pointers |= dict.fromkeys(("q", "sinks", "out"), data) | (PARTS if split else dict.fromkeys(PARTS, data))
    kernel = compiled(fixed._fixed_tile, pointers, constants, layer.capability, fixed.WARPS)
    assert "cp.async" in kernel.asm["ptx"], "keys are fetched ahead"
    fits(kernel, layer)


def test_joining_compiles() -> None:
    from core.attention.triton import fixed

    layer = LAYERS["llama-sm80"]
    pointers = PARTS | dict.fromkeys(("sinks", "out"), "*bf16") | dict.fromkeys(("starts", "prefixes", "lens"), "*i64")
    constants = {"HEADS": layer.heads, "V_DIM": 128, "BLOCK_V": 128, "SUNK": True}
    fits(compiled(fixed._join_parts, pointers, constants, layer.capability), layer)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_products_compile_and_fit(dtype: str, capability: int) -> None:
    from core.models.fused import product

    data = f"*{dtype}"
    pointers: dict[str, Any] = dict.fromkeys(("x", "weight", "bias", "out"), data)
    constants = {"BLOCK_M": product.BLOCK_M, "BLOCK_N": product.BLOCK_N, "BIASED": True}
    constants["BLOCK_K"] = product.BLOCK_BYTES // (2 if dtype == "bf16" else 4)
    kernel = compiled(product._multiply, pointers, constants, capability, num_stages=product.STAGES)
    assert "cp.async" in kernel.asm["ptx"], "weights are fetched ahead"
    fits(kernel, next(layer for layer in LAYERS.values() if layer.capability == capability))
