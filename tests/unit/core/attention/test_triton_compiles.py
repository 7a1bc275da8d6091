"""Our kernels compile for GPUs that are not at hand, down to machine code, and fit into their shared memory.

Triton brings its own assembler and can be told a target. That is not running them, but a kernel that the interpreter
likes and the compiler does not is found here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from core.attention.base import MOST_CHUNKS
from tests.support.repository import ROOT
from tests.unit.core.attention.test_conformance import INTERPRETED

# Before Triton reads it: what was compiled once stays in the checkout, not in the home of the caller.
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "cache" / "triton"))

TRITON = find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not TRITON, reason="triton is not installed (slipstream[cuda])"),
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
]

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What one program may have, by compute capability."""
SPILLED_BYTES = 64
"""Of a thread: more are read and written again for every block of keys."""


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
    codes: int = 0
    """How codes are read (`core.attention.triton.codes`); 0: there are none."""
    farthest: int = 0
    """With a bias by distance, where that ends; prompts know none."""


LAYERS = {
    "llama-sm80": Layer(80),
    "latent-and-special-sm90": Layer(90, heads=128, kv_heads=1, k_dim=576, v_dim=512, special=True),
    "latent-sm80": Layer(80, heads=128, kv_heads=1, k_dim=576, v_dim=512),
    "gemma-sm90": Layer(90, heads=8, kv_heads=4, k_dim=256, v_dim=256, special=True),
    "float32-sm80": Layer(80, dtype="fp32"),
    "codes-sm80": Layer(80, codes=1),
    "codes-sm90": Layer(90, codes=2),
    "codes-latent-special-sm90": Layer(90, heads=128, kv_heads=1, k_dim=576, v_dim=512, special=True, codes=2),
    "t5-sm80": Layer(80, heads=12, kv_heads=12, k_dim=64, v_dim=64, farthest=128),
}


def compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int, warps: int = 4, **options: Any
) -> Any:
    """`kernel` for a GPU of `capability`; what is neither a pointer nor a constant is a 32-bit number.

    Pointers and numbers are multiples of 16, as those of a real launch are. Triton sees it where the kernel lets it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature |= dict.fromkeys(("scale", "softcap"), "fp32") if "scale" in signature else {}
    signature |= pointers | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    seen = [each for each in kernel.params if not (each.do_not_specialize or each.do_not_specialize_on_alignment)]
    even = [each.num for each in seen if signature[each.name] not in ("constexpr", "fp32")]
    hints = {(place,): [["tt.divisibility", 16]] for place in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, **options})


def tiles_of(layer: Layer) -> Any:
    """What `Tiles.of` says of a large GPU."""
    from core.attention.triton.tiles import Tiles

    properties = type("Properties", (), {"multi_processor_count": 132})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        dtype = torch.bfloat16 if layer.dtype == "bf16" else torch.float32
        return Tiles.of(torch.device("cuda"), layer.k_dim, dtype, layer.codes)


def constants_of(layer: Layer, block_n: int) -> dict[str, Any]:
    """Those that the decode kernel and the extend kernel have in common."""
    import triton

    from core.attention.triton.reads import key_blocks

    block_k, block_r = key_blocks(layer.k_dim)
    return {
        "HEADS": layer.heads,
        "GROUP": layer.heads // layer.kv_heads,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "BLOCK_R": block_r,
        "BLOCK_V": triton.next_power_of_2(layer.v_dim),
        "PAGE": 16,
        "RENAMED": layer.special,
        "CAPPED": layer.special,
        "WINDOW": 1024 if layer.special else 0,
        "CHUNK": 4096 if layer.special else 0,
        "CODES": layer.codes,
    }


def stored(layer: Layer) -> dict[str, str]:
    """Kinds of what the pool holds."""
    each = "*u8" if layer.codes else f"*{layer.dtype}"
    return dict.fromkeys(("keys", "values", "k_scales", "v_scales"), each)


def check_codes(kernel: Any, layer: Layer) -> None:
    """That they are read by instructions where they are meant to be."""
    assert ("cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]) == (layer.codes == 2)


PAGED = dict.fromkeys(("table", "page_map"), "*i32") | dict.fromkeys(("rows", "lens"), "*i64")
PARTS = dict.fromkeys(("part", "peaks", "totals"), "*fp32")


def assembled(kernel: Any, capability: int, figure: str) -> int:
    """What Triton's assembler says of a kernel for a thread: the group of the pattern `figure`."""
    import triton

    assembler, arch = triton.knobs.nvidia.ptxas.path, f"sm_{capability}" + ("a" if capability == 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(kernel.asm["ptx"])
        source.flush()
        asked = [assembler, "-v", "--gpu-name", arch, source.name, "-o", os.devnull]
        told = subprocess.run(asked, check=True, capture_output=True, text=True).stderr
    found = re.search(figure, told)
    assert found is not None, told
    return int(found[1])


def fits(kernel: Any, layer: Layer) -> None:
    assert kernel.asm["cubin"], "machine code"
    assert kernel.metadata.shared <= SHARED_BYTES[layer.capability], kernel.metadata.shared
    assert assembled(kernel, layer.capability, r"(\d+) bytes spill stores") <= SPILLED_BYTES


@pytest.mark.parametrize("name", LAYERS)
def test_decode_compiles_and_fits(name: str) -> None:
    from core.attention.triton import decode, splits

    layer = LAYERS[name]
    data = f"*{layer.dtype}"
    tile = tiles_of(layer).decode(8, layer.heads, layer.kv_heads, layer.v_dim, 32768)
    shared = constants_of(layer, tile.block_n)
    joined = tile.joins(layer.v_dim)
    assert joined == (layer.kv_heads > 1), "where few heads share keys, the last split merges"
    constants = shared | {"BLOCK_H": tile.block_h, "SPLIT_LEAST": tile.split_least, "SUNK": layer.special}
    constants |= {"JOINED": joined, "SOME": decode.TOGETHER // shared["BLOCK_V"], "FARTHEST": layer.farthest}
    pointers = PAGED | PARTS | dict.fromkeys(("q", "keys", "values", "sinks", "out"), data) | {"arrived": "*i32"}
    pointers |= stored(layer)
    pointers["biases"] = "*fp32" if layer.farthest else data
    kernel = compiled(decode._decode_split, pointers, constants, layer.capability, tile.warps)
    assert "cp.async" in kernel.asm["ptx"], "keys are fetched ahead"
    check_codes(kernel, layer)
    fits(kernel, layer)
    constants = {name: shared[name] for name in ("HEADS", "V_DIM", "BLOCK_V")}
    constants |= {"SUNK": layer.special, "RAGGED": True}
    pointers = PARTS | {"sinks": data, "out": data} | dict.fromkeys(("starts", "prefixes", "lens"), "*i64")
    fits(compiled(splits._merge_splits, pointers, constants, layer.capability), layer)


@pytest.mark.parametrize("longest", [2, 16, 2048])
@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if not layer.farthest])
def test_extend_compiles_and_fits(name: str, longest: int) -> None:
    check_extend(name, longest, 0)


@pytest.mark.parametrize("places", [16, 1024])
@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if not layer.farthest])
def test_segments_that_share_places_compile_and_fit(name: str, places: int) -> None:
    check_extend(name, places, MOST_CHUNKS)


def check_extend(name: str, longest: int, searched: int) -> None:
    """For segments of `longest` tokens, or that have so many together and are `searched`."""
    from core.attention.triton import extend
    from core.attention.triton.tiles import warps_of

    layer = LAYERS[name]
    tiles, data = tiles_of(layer), f"*{layer.dtype}"
    tile = tiles.extend(longest, 2, layer.heads, layer.kv_heads, 32768)
    split = tile.splits > 1
    assert split == (longest < 1024), "that all of it is compiled here"
    constants = constants_of(layer, tile.block_n) | {"PACK": tile.pack, "BLOCK_M": tile.block_m}
    constants |= {"SPLIT": split, "SPLIT_LEAST": tile.split_least, "SUNK": layer.special}
    constants["SEARCHED"] = searched
    pointers = PAGED | dict.fromkeys(("starts", "prefixes"), "*i64")
    pointers |= dict.fromkeys(("q", "keys", "values", "sinks", "out"), data)
    pointers |= stored(layer)
    pointers |= PARTS if split else dict.fromkeys(PARTS, data)
    warps = warps_of(tile.block_m, constants["BLOCK_V"])
    kernel = compiled(extend._extend_tile, pointers, constants, layer.capability, warps)
    assert "cp.async" in kernel.asm["ptx"], "keys are fetched ahead"
    fits(kernel, layer)


@pytest.mark.parametrize("codes", [False, True])
def test_storing_compiles(codes: bool) -> None:
    from core.attention.triton import store

    data = dict.fromkeys(("k", "v"), "*bf16") | stored(Layer(90, codes=int(codes))) | {"slots": "*i64"}
    constants = {"K_DIM": 128, "V_DIM": 128, "BLOCK": 128, "BOTH": True, "CODES": codes}
    kernel = compiled(store._store, data, constants, 90)
    assert assembled(kernel, 90, r"(\d+) bytes spill stores") == 0
