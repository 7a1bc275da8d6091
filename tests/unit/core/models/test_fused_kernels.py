"""The kernels of a fused decoder give what is written out in `tests/support/fakes/plain_kernels.py`, and fit on GPUs.

What is marked `interpreted` runs in the process of `attention/test_triton.py`, and on a CUDA device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.memory.kv_e4m3 import encode
from tests.support.fakes import plain_kernels
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.test_conformance import DEVICE
from tests.unit.core.attention.test_triton import interpreted, needs_triton
from tests.unit.core.attention.test_triton_compiles import INTERPRETED, SHARED_BYTES, assembled, compiled

pytestmark = needs_triton

compiles = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        quick_calls(monkeypatch)


SUMS: dict[str, tuple[int, int, int, int]] = {
    "norm of what comes in": (0, 0, 1, 0),
    "add and norm": (1, 0, 1, 0),
    "norm, add and norm": (1, 1, 1, 0),
    "norm and add": (1, 1, 0, 0),
    "two added, two layer norms with biases": (2, 0, 7, 7),
    "layer norm": (1, 0, 3, 0),
}
"""How many are added, and the kinds of the norm behind, of the one before, and of another beside it."""


@interpreted
@DTYPES
@pytest.mark.parametrize("name", SUMS)
def test_interpreted_sums_equal_what_is_written_out(name: str, dtype: torch.dtype) -> None:
    from core.models.fused.residual import DeviceNorm, add_norm, norms_of

    count, *kinds = SUMS[name]
    rows, width = 3, 20
    x = drawn(rows, width, dtype=dtype)
    added = [drawn(rows, width, dtype=dtype, seed=1 + i) for i in range(count)]
    narrow = torch.float32 if 7 in kinds else dtype
    norms = [
        DeviceNorm(drawn(width, dtype=narrow, seed=5 + i) + 1, drawn(width, dtype=narrow, seed=9), 1e-5, kind)
        if kind
        else None
        for i, kind in enumerate(kinds)
    ]
    found = []
    for kernel in (add_norm, plain_kernels.add_norm):
        out = [torch.zeros_like(x) if wanted else None for wanted in (count, kinds[1], kinds[2])]
        kernel(x, added, *out, *norms_of(x, *norms), 0.3)
        found.append(out)
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, **TOLERANCE[dtype])


LAYOUTS: dict[str, dict[str, Any]] = {
    "halves": {},
    "neighbours of a part": {"half": 3, "neighbours": True},
    "nothing turned": {"half": 0, "q_kind": 1, "k_kind": 1},
    "normed, then turned": {"q_kind": 1, "k_kind": 1},
    "turned, then normed": {"q_kind": 1, "k_kind": 1, "turns_first": True},
    "weights of each head": {"q_kind": 7, "k_kind": 7, "q_step": 10, "k_step": 10},
    "weights of each query head, and of all key heads": {"q_kind": 1, "k_kind": 1, "q_step": 10},
    "over all heads": {"q_kind": 1, "k_kind": 1, "q_step": 10, "k_step": 10, "whole": True},
    "head by head": {"kv_heads": 3, "step": 30, "keys": 10, "values": 20},
    "temperature": {"tempered": True},
}


def heads_of(name: str, dtype: torch.dtype) -> tuple[list[int], torch.Tensor, list[Any]]:
    """A layout, a product for it, and what `enter_heads` takes between pools and layout.

    Slots are those of any tokens; the last position is one that the tables have not.
    """
    from core.models.fused.heads import HeadLayout

    changes = dict(LAYOUTS[name])
    heads, kv_heads, dim, tokens, length = 3, changes.get("kv_heads", 2), 10, 3, 7
    tempered = changes.pop("tempered", False)
    plain = {"heads": heads, "kv_heads": 2, "dim": dim, "step": dim, "keys": heads * dim, "values": (heads + 2) * dim}
    rest = {"half": 5, "neighbours": False, "whole": False, "turns_first": False, "q_kind": 0, "k_kind": 0}
    layout = HeadLayout(**(plain | rest | {"q_step": 0, "k_step": 0} | changes))
    qkv = drawn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = drawn(length, max(1, layout.half), seed=3)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if layout.half else (None, None)
    widths = [(heads if layout.q_step else 1) * dim] * 2 + [(kv_heads if layout.k_step else 1) * dim] * 2
    norms = [drawn(width, dtype=dtype, seed=20 + i) for i, width in enumerate(widths)]
    positions, slots = (torch.tensor(each, device=DEVICE) for each in ([2, 6, length + 4], [4, 1, 8]))
    warmth = drawn(length, seed=4).exp() if tempered else None
    return [int(each) for each in layout], qkv, [positions, slots, *tables, warmth, norms, [1e-5, 1e-6]]


@interpreted
@DTYPES
@pytest.mark.parametrize("name", LAYOUTS)
def test_interpreted_heads_equal_what_is_written_out(name: str, dtype: torch.dtype) -> None:
    from core.models.fused.heads import enter_heads

    layout, qkv, rest = heads_of(name, dtype)
    found = []
    for kernel in (enter_heads, plain_kernels.enter_heads):
        pools = [torch.zeros(9, layout[1], layout[2], device=DEVICE, dtype=dtype) for _ in range(2)]
        given = qkv.clone()
        kernel(given, *pools, *rest, layout, None, None)
        found.append([given, *pools])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE[dtype])


@interpreted
@pytest.mark.parametrize("name", LAYOUTS)
def test_interpreted_heads_are_stored_as_the_codes_of_their_format(name: str) -> None:
    """Byte for byte those of the numbers that the product holds behind it.

    One number of each head is larger than all others, in another place from token to token; one head holds an
    infinity, and one nothing.
    """
    from core.models.fused.heads import HeadLayout, enter_heads

    layout, qkv, rest = heads_of(name, torch.bfloat16)
    it = HeadLayout(*layout)
    for token, place in enumerate((0, 6, 9)):
        for part in it.split(qkv)[1:]:
            part[:, token, place] *= 30 * 4.0**token
    it.split(qkv)[2][0, 1, 3], it.split(qkv)[2][1, 2] = torch.inf, 0
    shape = (9, it.kv_heads, it.dim)
    pools, scales = ([torch.zeros(size, device=DEVICE, dtype=torch.uint8) for _ in "kv"] for size in (shape, shape[:2]))
    given, plain = qkv.clone(), qkv.clone()
    enter_heads(given, *pools, *rest, layout, *scales)
    numbers = [torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
    plain_kernels.enter_heads(plain, *numbers, *rest, layout, None, None)
    torch.testing.assert_close(given, plain, **TOLERANCE[torch.bfloat16])
    for pool, exponents, heads in zip(pools, scales, it.split(given)[1:], strict=True):
        for found, want in zip((pool, exponents), encode(heads.transpose(0, 1)), strict=True):
            whole = torch.zeros_like(found)
            whole[rest[1]] = want
            assert torch.equal(found, whole)


@interpreted
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_interpreted_activations_equal_those_of_torch(name: str, gated: bool) -> None:
    from core.models.fused.gate import BLOCK, GATES, activate
    from core.models.native.reading import ACTIVATIONS

    assert set(GATES) == set(ACTIVATIONS)
    width = BLOCK + 3
    into = drawn(2, width * (1 + gated)).mul(2)
    found = []
    for kernel in (activate, plain_kernels.activate):
        out = torch.zeros(2, width, device=DEVICE)
        kernel(into, out, name)
        found.append(out)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def fits(kernel: Any, capability: int) -> None:
    assert kernel.asm["cubin"], "machine code"
    assert kernel.metadata.shared <= SHARED_BYTES[capability]
    assert assembled(kernel, capability, r"(\d+) bytes spill stores") == 0


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("width", "kinds"), [(4096, (0, 1, 0)), (16384, (1, 1, 0)), (6144, (0, 7, 7))])
def test_sums_compile_and_fit(width: int, kinds: tuple[int, int, int], capability: int) -> None:
    from core.models.fused import residual

    data = dict.fromkeys(("x", "first", "second", "out", "read", "other"), "*bf16")
    weights = [f"{norm}_{part}" for norm in ("behind", "read", "other") for part in ("weight", "bias")]
    numbers = dict.fromkeys(("factor", "behind_eps", "read_eps", "other_eps"), "fp32")
    constants = dict(zip(("BEHIND", "READ", "OTHER"), kinds, strict=True))
    block = 1 << (width - 1).bit_length()
    constants |= {"WIDTH": width, "BLOCK": block, "ADDED": 2 if kinds[2] else 1}
    pointers = data | dict.fromkeys(weights, "*fp32" if kinds[2] else "*bf16") | numbers
    fits(compiled(residual._add_norm, pointers, constants, capability, residual.warps_of(block)), capability)


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("whole", [False, True])
def test_heads_compile_and_fit(whole: bool, codes: bool, capability: int) -> None:
    from core.models.fused import heads

    data = dict.fromkeys(("qkv", "cos", "sin", "q_weight", "q_bias", "k_weight", "k_bias", "keys", "values"), "*bf16")
    pointers = data | dict.fromkeys(("positions", "slots"), "*i64") | {"temperature": "*fp32"}
    pointers |= {"q_eps": "fp32", "k_eps": "fp32"}
    pointers |= dict.fromkeys(("k_scales", "v_scales"), "*u8" if codes else "*bf16")
    if codes:
        pointers |= dict.fromkeys(("keys", "values"), "*u8")
    places = {"HEAD_STEP": 128, "KEYS": 40 * 128, "VALUES": 48 * 128, "HALF": 64}
    kinds = {"Q_NORM": 1, "K_NORM": 1, "Q_STEP": 128 * whole, "K_STEP": 128 * whole, "TURNS_FIRST": False}
    blocks = {"BLOCK_H": 64 if whole else 1, "BLOCK_HALF": 64, "BLOCK_REST": 1, "BLOCK_V": 128}
    constants: dict[str, Any] = {"HEADS": 40, "KV_HEADS": 8, "DIM": 128, "WHOLE": whole, "TEMPERED": not whole}
    constants["CODES"] = codes
    constants |= {"NEIGHBOURS": not whole} | places | kinds | blocks
    warps = heads.warps_of(constants["BLOCK_H"] * 128)
    fits(compiled(heads._enter_heads, pointers, constants, capability, warps), capability)


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activations_compile_and_fit(name: str, capability: int) -> None:
    from core.models.fused import gate

    constants = {"WIDTH": 14336, "GATED": True, "ACTIVATION": gate.GATES[name], "BLOCK": gate.BLOCK}
    fits(compiled(gate._activate, {"into": "*bf16", "out": "*bf16"}, constants, capability), capability)
