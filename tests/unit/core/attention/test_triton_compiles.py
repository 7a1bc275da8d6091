"""Our kernels compile for GPUs that are not at hand, down to machine code, and fit into their shared memory.

Triton brings its own assembler and can be told a target. That is not running them, but a kernel that the interpreter
likes and the compiler does not is found here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.repository import ROOT
from tests.unit.core.attention.test_conformance import INTERPRETED

# Before Triton reads it: what was compiled once stays in the checkout, not in somebody's home.
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "cache" / "triton"))

TRITON = find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not TRITON, reason="triton is not installed (slipstream[cuda])"),
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
]

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What one program may have, by compute capability."""


@dataclass(frozen=True)
class Layer:
    """One kind of layer, with everything that selects another code path."""

    capability: int
    heads: int = 32
    kv_heads: int = 8
    k_dim: int = 128
    v_dim: int = 128
    dtype: str = "bf16"
    special: bool = False
    """Window, chunk, capped scores, sinks and renamed pages."""


LAYERS = {
    "llama-sm80": Layer(80),
    "latent-and-special-sm90": Layer(90, heads=128, kv_heads=1, k_dim=576, v_dim=512, special=True),
}


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int, warps: int = 4) -> Any:
    """`kernel` for a GPU of `capability`; what is neither a pointer nor a constant is a 32-bit number.

    Pointers and numbers are multiples of 16, as those of a real launch are, and Triton sees it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature |= dict.fromkeys(("scale", "softcap"), "fp32") if "scale" in signature else {}
    signature |= pointers | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    even = [[["tt.divisibility", 16]]] * len(kernel.arg_names)
    hints = {(i,): hint for i, hint in enumerate(even) if signature[kernel.arg_names[i]] not in ("constexpr", "fp32")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


@pytest.mark.parametrize("name", LAYERS)
def test_attention_compiles_and_fits(name: str) -> None:
    import triton

    from core.attention.triton import decode, extend
    from core.attention.triton.backend import Tiles

    layer = LAYERS[name]
    cuda = torch.device("cuda")
    size = 2 if layer.dtype == "bf16" else 4
    with pytest.MonkeyPatch.context() as patch:
        properties = type("Properties", (), {"multi_processor_count": 132})
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        tiles = Tiles.of(cuda, layer.k_dim * size)
    data, group = f"*{layer.dtype}", layer.heads // layer.kv_heads
    shared = {
        "HEADS": layer.heads,
        "GROUP": group,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": triton.next_power_of_2(layer.k_dim),
        "BLOCK_V": triton.next_power_of_2(layer.v_dim),
        "PAGE": 16,
        "RENAMED": layer.special,
        "CAPPED": layer.special,
        "WINDOW": 1024 if layer.special else 0,
        "CHUNK": 4096 if layer.special else 0,
    }
    common = dict.fromkeys(("q", "keys", "values"), data) | dict.fromkeys(("table", "page_map"), "*i32")
    common |= dict.fromkeys(("rows", "lens"), "*i64")
    block_h = min(64, max(16, triton.next_power_of_2(group)))
    splits = {"BLOCK_H": block_h, "SPLITS": 7, "SPLIT_LEAST": tiles.split_least}
    partial = dict.fromkeys(("part", "peaks", "totals"), "*fp32")
    kernels = [
        compiled(decode._decode_split, common | partial, shared | splits, layer.capability),
        compiled(
            decode._merge_splits,
            partial | {"sinks": data, "out": data},
            {name: shared[name] for name in ("HEADS", "V_DIM", "BLOCK_V")}
            | {"SPLITS": 7, "BLOCK_S": 8, "SUNK": layer.special},
            layer.capability,
        ),
        compiled(
            extend._extend_tile,
            common | dict.fromkeys(("starts", "prefixes"), "*i64") | {"sinks": data, "out": data},
            shared | {"BLOCK_M": tiles.block_m, "SUNK": layer.special},
            layer.capability,
            warps=8 if tiles.block_m > 64 else 4,
        ),
    ]
    assert all("cp.async" in kernel.asm["ptx"] for kernel in kernels[::2]), "keys are fetched ahead"
    for kernel in kernels:
        assert kernel.asm["cubin"], "machine code"
        assert kernel.metadata.shared <= SHARED_BYTES[layer.capability], kernel.metadata.shared


def test_storing_compiles() -> None:
    from core.attention.triton import store

    data = dict.fromkeys(("keys", "values", "k", "v"), "*bf16") | {"slots": "*i64"}
    constants = {"K_DIM": 128, "V_DIM": 128, "BLOCK": 128, "BOTH": True}
    assert compiled(store._store, data, constants, 90).asm["cubin"]
