"""The sampling kernels compile for GPUs that are not at hand, fit them, and round as the plain way does."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.grammar_batch import TokenMask
from core.sampling.sampler import Scored
from tests.unit.core.attention.test_conformance import INTERPRETED
from tests.unit.core.attention.test_triton import needs_triton
from tests.unit.core.attention.test_triton_compiles import SHARED_BYTES, assembled, compiled
from tests.unit.core.sampling.batches import CPU, Row, batch_of, history_of, places_of
from tests.unit.core.sampling.test_no_sync import OPTIONS

pytestmark = needs_triton

compiles = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

WIDTH = 128 * 1024
"""Tokens of a large vocabulary, a whole number of blocks."""
FUSED = re.compile(r"\bfma\.rn(\.ftz)?\.f32")
"""A product and a sum, rounded once."""
FLUSHED = re.compile(r"\b(add|sub|mul|div|max|min|setp)[.\w]*\.ftz\b")
"""Subnormal numbers taken for zero. Rounding to whole numbers does so too, and that is their floor here."""
KINDS = {
    **dict.fromkeys(("logits", "floats", "values", "saved", "normalisers", "logprobs", "top_values"), "*fp32"),
    **dict.fromkeys(("bits", "history", "scratch", "words"), "*i32"),
    **dict.fromkeys(("lens", "whole", "entries", "tokens", "wanted", "top_ids"), "*i64"),
    **dict.fromkeys(("uniforms", "top_ps"), "*fp64"),
    "non_finite": "*i8",
}


def kernel_of(function: Any, constants: dict[str, Any], capability: int, warps: int) -> Any:
    pointers = {name: kind for name, kind in KINDS.items() if name in function.arg_names}
    return compiled(function, pointers, constants, capability, warps, enable_fp_fusion=False)


def fits(kernel: Any, capability: int) -> None:
    assert kernel.asm["cubin"], "machine code"
    assert kernel.metadata.shared <= SHARED_BYTES[capability] // 4
    assert assembled(kernel, capability, r"(\d+) bytes spill stores") == 0
    assert assembled(kernel, capability, r"Used (\d+) registers") <= 128, "two programs a multiprocessor"


@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_a_row_is_sampled_by_a_kernel_that_fits(capability: int) -> None:
    from core.sampling.draw import weight_bits
    from core.sampling.triton import rows

    constants = {"BITS": weight_bits(WIDTH), "BLOCK": rows.BLOCK}
    kernel = kernel_of(rows._sample_row, constants, capability, rows.WARPS)
    fits(kernel, capability)
    assert not FUSED.search(kernel.asm["ptx"]), "weights are rounded as by PyTorch"
    assert "div.full.f32" not in kernel.asm["ptx"], "and so are quotients"
    assert not FLUSHED.search(kernel.asm["ptx"]), "numbers next to zero are numbers"


@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_log_probabilities_come_from_a_kernel_that_fits(capability: int) -> None:
    from core.sampling.triton import raw

    fits(kernel_of(raw._normalise_row, {"BLOCK": raw.BLOCK}, capability, raw.WARPS), capability)


def specialised(function: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
    """What of a launch selects the kernel: Triton compiles one for each of these lists."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    flags = [(not each.do_not_specialize, not each.do_not_specialize_on_alignment) for each in function.params]
    seen = zip(arguments, flags[: len(arguments)], strict=True)
    return [native_specialize_impl(BaseBackend, each, False, *flag) for each, flag in seen] + [constants]


class Caught:
    """Stands in for a kernel, and keeps what its launches would select."""

    def __init__(self, function: Any) -> None:
        from triton.runtime.jit import JITFunction

        # An interpreted function keeps what it was declared with.
        is_compiled = isinstance(function, JITFunction)
        self.function = function if is_compiled else JITFunction(function.fn, **function.kwargs)
        self.kinds: list[list[Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.kinds.append(specialised(self.function, arguments, constants))


@pytest.mark.parametrize("vocab", [1003, 1024])
def test_no_step_needs_a_kernel_that_start_up_did_not(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its options, how many rows it has, where they begin, and how long their histories are."""
    from core.sampling.triton import raw, rows
    from core.sampling.triton.sampler import TritonSampler

    caught = {"_sample_row": Caught(rows._sample_row), "_normalise_row": Caught(raw._normalise_row)}
    monkeypatch.setattr(rows, "_sample_row", caught["_sample_row"])
    monkeypatch.setattr(raw, "_normalise_row", caught["_normalise_row"])
    sampler = TritonSampler(vocab, CPU)
    sampler.warm()
    warm = {name: list(each.kinds) for name, each in caught.items()}
    for options in OPTIONS.values():
        for count, alternatives in ((1, -1), (3, 0), (16, 1), (17, 5)):
            made = [Row(torch.zeros(vocab), **{"uniform": 0.3, **options})] * count
            batch = batch_of(made, logprobs=alternatives >= 0, top_logprobs=max(alternatives, 0))
            mask = TokenMask(np.arange(count % 3), np.ones((count % 3, 2 * count), np.int32))
            # The second half of a step that is sampled in pieces begins at an odd row of everything.
            for start, longest in ((0, 64), (1, 37)):
                whole = places_of([*made, *made[:start]])
                logits = torch.zeros(count + start, vocab)[start:]
                scored = Scored(logits, whole.part(slice(start, count + start)))
                scored.raw = None if alternatives < 0 else torch.zeros(count + start, 2)[start:]
                sampler.pick(
                    sampler.score(logits, batch, scored.places, history_of(made, max_len=longest)), batch, mask
                )
                scored.history = history_of(made, max_len=longest)
                sampler.pick(scored, batch, mask)
    for name, each in caught.items():
        assert len(each.kinds) > 40
        assert all(kind in warm[name] for kind in each.kinds), name
