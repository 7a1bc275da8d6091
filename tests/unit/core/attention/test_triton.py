"""The Triton backend without a GPU: its kernels interpreted, in a process of their own, since that is set at import.

What is marked `interpreted` runs there, and on a CUDA device; the conformance suite runs there in part. Interpreted
kernels take about a thousand times as long, so shapes are tiny.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.registry import build_attention, default_attention
from core.errors import ConfigError
from core.memory.kv_e4m3 import FP8_E4M3
from tests.support.fakes.paged_steps import Part
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.support.repository import ROOT
from tests.unit.core.attention.dense import FARTHEST, LAYER, KnownRows, Shape
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED, TOLERANCE, check
from tests.unit.core.attention.test_grids import PARTS, WIDTH, check_grid, grid_batch, packed

RUNS = INTERPRETED or DEVICE == "cuda"

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")
interpreted = pytest.mark.skipif(not RUNS, reason="runs interpreted, in the process of the first test, or on CUDA")

SHAPES = (
    "wide-gqa narrow-values-gqa latent-window window-and-chunk softcap-sinks-chunk sinks-window bf16-window "
    "bf16-narrow-values renamed-window codes-bf16-sinks codes-bf16-latent"
).split()
CONFORMANCE = " or ".join(
    [*(f"formula[triton-4-{name}]" for name in SHAPES), "padded", "hidden", "writes_every", "may_differ"]
)


CHOSEN = {
    "tests/unit/core/attention/test_conformance.py": f"triton and ({CONFORMANCE})",
    "tests/unit/core/attention/test_fixed.py": "interpreted",
    "tests/unit/core/attention/test_mixed_attention.py": "interpreted",
    "tests/unit/core/attention/test_triton.py": "interpreted and not conform",
    "tests/unit/core/attention/test_triton_joined.py": "interpreted",
    "tests/unit/core/attention/test_triton_tiles.py": "interpreted",
    "tests/unit/core/attention/test_e4m3.py": "interpreted",
    "tests/unit/core/relay/test_fused_relay.py": "interpreted",
    "tests/unit/core/sampling/test_triton_sampling.py": "interpreted",
    "tests/unit/core/models/lora/test_row_deltas.py": "interpreted",
    "tests/unit/core/models/test_attention_proof.py": "interpreted",
    "tests/unit/core/models/test_coded_proof.py": "interpreted",
    "tests/unit/core/models/test_fixed_product.py": "interpreted",
    "tests/unit/core/models/test_fused.py": "interpreted and not (_gated or _normed or qwen3)",
    "tests/unit/core/models/test_fused_decoder.py": "interpreted",
    "tests/unit/core/models/test_fused_kernels.py": "interpreted",
    "tests/unit/core/models/test_invariance_proof.py": "fused",
    "tests/proofs/equivalence/test_decode_graphs.py": "interpreted",
    "tests/proofs/equivalence/test_mixed_graphs.py": "interpreted",
    "tests/proofs/equivalence/test_captured_families.py": "interpreted",
}


DEAR = (
    "attend_as_one_head_a_tile or segments_of_any_length or tiles_can_be_captured[64] or may_differ or own_check "
    "or splits_merge or bf16-window or renamed-window or narrow-values or grids_match or inside_graphs "
    "or random_mixes or mixes_match or mixes_can "
    "or decoder_equals or captured_steps or counts_from_zero or two_launches or (written_out and bfloat16) "
    "or 4-wide-gqa or sinks-window or any_width[extend] or hidden_from_all[None] or more_biases or sampler[2600] "
    "or changes_happen_once or padded or writes_every or taken_back[_rotate] or adapters_of_their_rows or no_place_for "
    "or can_be_captured[codes] or grids_can or hidden_from_all[5] or plain_sampler[777] "
    "or are_proved or fixed_parts or fused_decoders_are"
)
"""Nine tenths of the time of all; `KEPT` of them are in every run."""
KEPT = (
    "splits_merge_to_the_formula[17] or splits_merge_to_the_formula[79] "
    "or mixes_match_the_formula[packed-many] "
    "or fixed_parts_give_the_same_bits_in_any_step[window-and-chunk] or fixed_parts_are_captured "
    "or fused_decoders_are_proved_with_fixed_products_and_parts[parts] "
    "or are_proved[deepseek_v3] or decoder_equals_transformers[gemma3_text] or counts_from_zero_again[softcap]"
)


@needs_triton
@pytest.mark.skipif(RUNS, reason="this is that process")
@pytest.mark.parametrize("left_out", [f"({DEAR}) and not ({KEPT})", ""], ids=["most", "all"])
def test_interpreted_kernels_conform(left_out: str) -> None:
    """In one process: half a dozen seconds of each would go into imports."""
    # NumPy multiplies for the interpreter. For CPUs without AVX-512 OpenBLAS has kernels that give a row other bits in
    # another shape; those for this older one do not, and run on each of them.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    chosen = " or ".join(f"({Path(file).name} and {names})" for file, names in CHOSEN.items())
    chosen = f"({chosen}) and not ({left_out})" if left_out else chosen
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rA", "-p", "no:cacheprovider", *CHOSEN, "-k", chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = {line.removeprefix("PASSED ").partition("::")[0] for line in done.stdout.splitlines()}
    whole = {name for name in CHOSEN if name.startswith("tests/proofs")} if left_out else set()
    assert passed >= set(CHOSEN) - whole and "skipped" not in done.stdout, done.stdout[-2000:]


@needs_triton
@pytest.mark.skipif(RUNS, reason="can run here")
def test_on_a_cpu_it_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"triton.*cpu.*compiles for GPUs.*TRITON_INTERPRET"):
        build_attention("triton", torch.device("cpu"))


def test_cuda_devices_get_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for spec, name in ((object(), "triton"), (None, "torch_native")):
        monkeypatch.setattr("core.attention.registry.find_spec", lambda _, spec=spec: spec)
        assert default_attention(cuda) == name
        assert default_attention(torch.device("cpu")) == "torch_native"


def spoil_unseen(rows: KnownRows, parts: list[Part]) -> None:
    """NaN into every slot of the pool that no query of `parts` may see."""
    shape, pool = rows.shape, rows.paged.pool
    unseen = torch.ones(pool.num_slots, dtype=torch.bool)
    for part in parts:
        low = 0 if shape.window is None else max(0, part.prefix - shape.window + 1)
        unseen[rows.paged.table[part.row, low : part.prefix + part.extend].long().cpu()] = False
    for held in (pool.k(LAYER), pool.v(LAYER)):
        held[unseen.to(held.device)] = torch.nan


@interpreted
@pytest.mark.parametrize("window", [None, 5])
def test_interpreted_kernels_read_no_key_that_is_hidden_from_all(window: int | None) -> None:
    rows = KnownRows(Shape(window=window), num_rows=4, max_len=40, page_size=4, seed=3, device=DEVICE)
    parts = [Part(1, 0, 18), Part(4, 20, 3), Part(2, 37, 1), Part(3, 6, 1)]
    rows.fill(parts)
    spoil_unseen(rows, parts)
    got = rows.attend(build_attention("triton", torch.device(DEVICE)), parts, num_extend=2)
    assert (got.double() - rows.expected(parts)).abs().max() < TOLERANCE[torch.float32]


@interpreted
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 79])
def test_interpreted_splits_merge_to_the_formula(length: int) -> None:
    """16 keys per split at least, 3 splits at most: none empty, one empty, more than one block in each."""
    rows = KnownRows(Shape(sinks=True), num_rows=2, max_len=80, page_size=4, seed=length, device=DEVICE)
    check(rows, build_attention("triton", torch.device(DEVICE)), [Part(2, length - 1, 1), Part(1, 2, 1)], 0)


@interpreted
def test_interpreted_decode_adds_a_bias_by_distance() -> None:
    """Up to its end and beyond; the native backend, which takes over where prompts are, must not be asked."""
    rows = KnownRows(Shape(heads=2, kv_heads=2, bias=True), num_rows=2, max_len=40, page_size=4, seed=8, device=DEVICE)
    backend: Any = build_attention("triton", torch.device(DEVICE))
    check(rows, backend, [Part(2, FARTHEST, 1), Part(1, 36, 1)], 0)
    assert backend._native is None


@interpreted
@pytest.mark.parametrize(
    "parts", [[Part(1, 20, 1), Part(2, 3, 1)], [Part(1, 7, 9), Part(2, 0, 3)]], ids=["decode", "extend"]
)
def test_interpreted_keys_of_any_width(parts: list[Part]) -> None:
    """32 elements are multiplied and 8 that are left, or all 24 at once."""
    for width in (40, 24):
        rows = KnownRows(Shape(k_dim=width), num_rows=2, max_len=24, page_size=4, seed=width, device=DEVICE)
        extends = sum(part.extend > 1 for part in parts)
        check(rows, build_attention("triton", torch.device(DEVICE)), parts, extends)


@interpreted
@pytest.mark.parametrize("shape", [Shape(), Shape(format=FP8_E4M3, dtype=torch.bfloat16)], ids=["numbers", "codes"])
def test_interpreted_decode_can_be_captured(shape: Shape) -> None:
    """Recorded once on padding, replayed with other rows, lengths and tokens in the same memory."""
    device, dtype = torch.device(DEVICE), shape.dtype
    rows = KnownRows(shape, num_rows=4, max_len=40, page_size=4, seed=5, device=DEVICE)
    backend: Any = build_attention("triton", device)
    padding = [Part(0, 0, 1)] * 3
    batch = rows.paged.batch(padding, 0)
    q, k, v = (torch.zeros(heads, 3, 16, device=device, dtype=dtype) for heads in (4, 2, 2))
    out = torch.zeros(3, 4, 16, device=device, dtype=dtype)

    def work() -> None:
        backend.plan(batch)
        out.copy_(backend.forward(LAYER, q, k, v, scale=rows.scale))

    with torch.inference_mode():
        graph = TracedGraphs().capture(work)
    for parts in ([Part(2, 30, 1), Part(1, 3, 1), Part(0, 0, 1)], [Part(4, 7, 1), Part(2, 31, 1), Part(3, 38, 1)]):
        rows.fill(parts)
        real = rows.paged.batch(parts, 0)
        for name in ("rows", "seq_lens", "positions", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(real, name))
        for held, source in ((q, rows.q), (k, rows.k), (v, rows.v)):
            held.copy_(torch.cat([source[p.row, p.prefix : p.prefix + 1] for p in parts]).transpose(0, 1))
        graph.replay()
        places = [i for i, part in enumerate(parts) if part.row]
        expected = rows.expected([parts[i] for i in places])
        assert (out[places].double() - expected).abs().max() < TOLERANCE[dtype]
        assert out.isfinite().all()


@interpreted
@pytest.mark.parametrize("shape", [Shape(), Shape(window=5, sinks=True), Shape(chunk=8, renamed=True)], ids=str)
def test_interpreted_grids_match_the_formula(shape: Shape) -> None:
    rows = KnownRows(shape, num_rows=4, max_len=40, page_size=4, seed=7, device=DEVICE)
    check_grid(rows, build_attention("triton", torch.device(DEVICE)), PARTS, TOLERANCE[torch.float32])


@interpreted
def test_interpreted_grids_can_be_captured() -> None:
    """Recorded once, replayed with rows of other lengths and drafts in the same memory, and with padding."""
    device = torch.device(DEVICE)
    rows = KnownRows(Shape(), num_rows=4, max_len=40, page_size=4, seed=8, device=DEVICE)
    backend: Any = build_attention("triton", device)
    batch = grid_batch(rows, [Part(0, 0, 1)] * 2)
    held = [torch.zeros(heads, 2 * WIDTH, 16, device=device) for heads in (4, 2, 2)]
    out = torch.zeros(2 * WIDTH, 4, 16, device=device)

    def work() -> None:
        backend.plan(batch)
        out.copy_(backend.forward(LAYER, *held, scale=rows.scale))

    with torch.inference_mode():
        graph = TracedGraphs().capture(work)
    for parts in ([Part(2, 30, 3), Part(0, 0, 1)], [Part(4, 7, 1), Part(3, 33, 4)]):
        rows.fill(parts)
        real = grid_batch(rows, parts)
        for name in ("rows", "seq_lens", "prefix_lens", "positions", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(real, name))
        for memory, source in zip(held, packed(rows, parts), strict=True):
            memory.copy_(source)
        graph.replay()
        real_parts = [(i, part) for i, part in enumerate(parts) if part.row]
        got = torch.cat([out[WIDTH * i : WIDTH * i + part.extend] for i, part in real_parts])
        expected = rows.expected([part for _, part in real_parts])
        assert (got.double() - expected).abs().max() < TOLERANCE[torch.float32]
        assert out.isfinite().all()
