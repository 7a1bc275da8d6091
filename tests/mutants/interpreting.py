"""Mutants of the Triton kernels, which their tests run interpreted: attention over pages, and the fused layers.

They are left out where Triton is not installed, as those tests are.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ATTENTION = "core/attention/triton/"
FUSED = "core/models/fused/"
KERNELS = "tests/attention/test_triton.py::"
FORMULA = "tests/attention/test_conformance.py::test_random_mixed_steps_match_the_formula[triton-4-"
LAYERS = "tests/models/test_fused.py::"

INTERPRETING: tuple[Mutant, ...] = (
    Mutant(
        "decode-sees-all-but-itself",
        "a decode row's own key is one of those that it sees",
        ATTENTION + "backend.py",
        "batch.seq_lens[count:]",
        "batch.seq_lens[count:] - 1",
        FORMULA + "wide-gqa]",
        needs="triton",
    ),
    Mutant(
        "split-reads-its-neighbours-keys",
        "a split ends where the next one begins, and the last one with the row",
        ATTENTION + "decode.py",
        "high = tl.minimum(low + share, length)",
        "high = tl.minimum(low + share + 1, length)",
        KERNELS + "test_interpreted_splits_merge_to_the_formula[64]",
        needs="triton",
    ),
    Mutant(
        "sink-weighs-without-the-peak",
        "a sink is weighed against the greatest score of its row",
        ATTENTION + "decode.py",
        "denominator += tl.exp(sink - top)",
        "denominator += tl.exp(sink)",
        KERNELS + "test_interpreted_splits_merge_to_the_formula[33]",
        needs="triton",
    ),
    Mutant(
        "query-sees-the-next-key",
        "a query of a prompt sees no key behind its own position",
        ATTENTION + "extend.py",
        "(places[None, :] <= positions[:, None])",
        "(places[None, :] <= positions[:, None] + 1)",
        FORMULA + "wide-gqa]",
        needs="triton",
    ),
    Mutant(
        "sums-keep-the-old-peak",
        "sums of earlier blocks are scaled to the peak of the latest",
        ATTENTION + "softmax.py",
        "acc = acc * decay[:, None] +",
        "acc = acc +",
        KERNELS + "test_interpreted_splits_merge_to_the_formula[79]",
        needs="triton",
    ),
    Mutant(
        "window-one-key-wide",
        "a window counts the query's own key",
        ATTENTION + "softmax.py",
        "query - WINDOW + 1",
        "query - WINDOW",
        KERNELS + "test_interpreted_kernels_read_no_key_that_is_hidden_from_all[5]",
        needs="triton",
    ),
    Mutant(
        "values-stride-as-keys",
        "values narrower than keys have a stride of their own",
        ATTENTION + "store.py",
        "slot * v_slot",
        "slot * k_slot",
        FORMULA + "narrow-values-gqa]",
        needs="triton",
    ),
    Mutant(
        "norm-over-the-padded-width",
        "the mean is over the row's width, not over that of the block which holds it",
        FUSED + "norm.py",
        "tl.sum(values * values, 0) / WIDTH",
        "tl.sum(values * values, 0) / BLOCK",
        LAYERS + "test_interpreted_norm_equals_the_module[20-dtype0]",
        needs="triton",
    ),
    Mutant(
        "gate-not-multiplied-by-itself",
        "the gate is SiLU, x times its sigmoid",
        FUSED + "activation.py",
        "(gates * tl.sigmoid(gates))",
        "tl.sigmoid(gates)",
        LAYERS + "test_interpreted_gate_equals_the_formula[dtype0]",
        needs="triton",
    ),
    Mutant(
        "keys-turned-as-queries",
        "programs behind the query heads turn the key heads",
        FUSED + "rotary.py",
        "place = head - HEADS",
        "place = 0",
        LAYERS + "test_interpreted_rotation_equals_the_function[dtype0]",
        needs="triton",
    ),
)
