"""Mutants of what weights are held as: adapters side by side, quantised matrices, fused layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "core/models/"
PEFT = "tests/models/lora/test_adapters.py::test_mixed_rows_equal_peft[llama]"
REFUSED = "tests/models/test_quantised_refusals.py::"
QUANTISED = "tests/models/test_quantised.py::"
FUSED = "tests/models/test_fused_layers.py::"

PACKING: tuple[Mutant, ...] = (
    Mutant(
        "adapter-unscaled",
        "an adapter changes as much as its alpha says",
        ROOM + "lora/checkpoint.py",
        '(pair["b"].float() * config.scaling(name))',
        'pair["b"].float()',
        PEFT,
    ),
    Mutant(
        "rank-stabilised-by-rank",
        "a rank-stabilised adapter is scaled by the root of its rank",
        ROOM + "lora/config.py",
        "math.sqrt(rank) if self.rslora else rank",
        "rank",
        PEFT,
    ),
    Mutant(
        "matrices-anywhere",
        "every matrix of an adapter begins where products are quick",
        ROOM + "lora/packed.py",
        "return -(-count // step) * step",
        "return count",
        "tests/models/lora/test_packed.py::test_matrices_of_any_size_begin_at_boundaries_and_keep_what_they_hold",
    ),
    Mutant(
        "matrices-over-each-other",
        "the two matrices of a module do not lie over each other",
        ROOM + "lora/packed.py",
        "buffer[self.b : self.b + self.outputs * self.rank]",
        "buffer[self.a : self.a + self.outputs * self.rank]",
        "tests/models/lora/test_packed.py::test_matrices_of_any_size_begin_at_boundaries_and_keep_what_they_hold",
    ),
    Mutant(
        "expressions-that-run-away",
        "an expression whose cost is exponential is never matched, so that no adapter stops all streams",
        ROOM + "lora/patterns.py",
        "risky = _QUANTIFIED_GROUP.search(plain) or",
        "risky =",
        "tests/models/lora/test_refusals.py::test_expressions_that_run_away_are_not_run[(a+)+b]",
    ),
    Mutant(
        "not-quantised-at-load",
        "a server that was told to quantise does so",
        ROOM + "quantized/at_load.py",
        'return PLAIN if name == "none" else AT_LOAD[name](model)',
        "return PLAIN",
        QUANTISED + "test_plain_weights_are_quantised_at_load_as_torchao_does",
    ),
    Mutant(
        "activations-scaled-together",
        "requests that share a step do not change each other's tokens by a scale of all their activations",
        ROOM + "quantized/compressed.py",
        'PER_TOKEN = ("token", "group", "tensor_group")',
        'PER_TOKEN = ("token", "group", "tensor_group", "tensor")',
        REFUSED + "test_parts_of_compressed_tensors[scale of all tokens]",
    ),
    Mutant(
        "mxfp4-kernels-fetched",
        "no kernel is fetched from the network to compute with packed experts",
        ROOM + "quantized/mxfp4.py",
        "Mxfp4Config(dequantize=True)",
        "Mxfp4Config(dequantize=False)",
        QUANTISED + "test_mxfp4_is_widened_and_asks_no_one_for_kernels",
    ),
    Mutant(
        "quantisation-unchecked",
        "what a method cannot compute is refused by name, before weights are read",
        ROOM + "quantized/registry.py",
        "    method.check(settings)\n",
        "",
        REFUSED + "test_parts_of_compressed_tensors[sparsity]",
    ),
    Mutant(
        "torchao-scales-together",
        "torchao weights that scale the activations of a step as one are refused",
        ROOM + "quantized/torchao.py",
        'if granularity == "PerTensor" and',
        'if granularity == "" and',
        REFUSED + "test_kinds_of_torchao",
    ),
    Mutant(
        "fused-rotation-of-a-batch",
        "several sequences at once are not given to a kernel that turns one",
        ROOM + "fused/layers.py",
        "q.dim() == 4 and q.shape[0] == 1",
        "q.dim() == 4",
        FUSED + "test_several_sequences_at_once_are_turned_by_the_model_itself",
    ),
    Mutant(
        "fused-for-good",
        "a model that fused layers would change computes by its own again",
        ROOM + "fused/layers.py",
        'module.__dict__.pop("forward", None)',
        'module.__dict__.get("forward", None)',
        FUSED + "test_fused_layers_give_what_the_modules_give_and_go_again",
    ),
)
