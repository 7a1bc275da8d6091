"""Mutants of constraints and their libraries: what is refused unseen, what a mask allows, and on which thread."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

XGRAMMAR = "core/sampling/grammar/xgrammar_backend.py"
GRAMMARS = "tests/constraints/test_grammars.py::"

MATCHING: tuple[Mutant, ...] = (
    Mutant(
        "mask-shifted-by-a-word",
        "tokens are allowed by their own bit, also where some rows alone are constrained",
        "core/sampling/grammar/mask.py",
        "    bits ^= MINUS_INFINITY\n",
        "",
        "tests/constraints/test_mask.py::test_only_masked_rows_change",
    ),
    Mutant(
        "slow-grammar-stays-on-the-loop",
        "a grammar with a slow row leaves the thread that all rows wait for",
        "core/sampling/grammar/mask_pool.py",
        "    if now - began > SLOW_SECONDS:\n        pace.is_quick = False\n",
        "",
        "tests/constraints/test_step_work.py::test_a_slow_row_sends_its_grammar_to_the_threads",
    ),
    Mutant(
        "end-token-stays-taken",
        "what was taken for an output that is computed again is given back, its end too",
        "core/sampling/grammar/llguidance_backend.py",
        "            self._has_ended, count = False, count - 1\n",
        "            count = count - 1\n",
        GRAMMARS + "test_tokens_stay_in_the_vocabulary_and_can_be_taken_back",
    ),
    Mutant(
        "made-up-end-is-sampled",
        "a constrained output holds no token that the model cannot say",
        "core/sampling/grammar/vocabulary.py",
        "        if self.virtual_end:\n",
        "        if self.virtual_end and self.end_ids[0] >= self.model_size:\n",
        "tests/constraints/test_vocabulary.py::test_a_mask_allows_what_the_model_can_sample_and_no_end_of_our_own",
    ),
    Mutant(
        "later-part-masked-as-the-first",
        "every row of a large step is masked by its own grammar",
        "core/sampling/grammar/mask.py",
        "staging.upload([mask.places[start : start + step]])",
        "staging.upload([mask.places[: len(bounds)]])",
        "tests/constraints/test_mask.py::test_a_step_of_many_logits_is_masked_part_by_part",
    ),
    Mutant(
        "library-that-is-absent-is-taken",
        "a grammar library that was asked for and is not installed stops the start",
        "core/sampling/grammar/registry.py",
        "    if wanted not in there:\n",
        "    if wanted not in BACKENDS:\n",
        "tests/constraints/test_registry.py::test_auto_takes_the_best_that_is_installed",
    ),
    Mutant(
        "worst-library-first",
        "the best grammar library that is installed is taken",
        "core/sampling/grammar/registry.py",
        "return there[0] if there else None",
        "return there[-1] if there else None",
        "tests/constraints/test_registry.py::test_auto_takes_the_best_that_is_installed",
    ),
    Mutant(
        "waiter-takes-the-work-with-it",
        "a client that gives up does not end the compiling that others wait for",
        "core/engine/grammar/compiler.py",
        "return await asyncio.shield(job.done)",
        "return await job.done",
        "tests/engine/test_grammar_compiler.py::test_a_waiter_that_gives_up_leaves_the_work_to_the_others",
    ),
    Mutant(
        "compiles-unbounded",
        "no more constraints wait to be compiled than the bound says",
        "core/engine/grammar/compile_queue.py",
        "len(self._jobs) >= self._most:",
        "len(self._jobs) > self._most:",
        "tests/engine/test_grammar_compiler.py::test_more_than_the_bound_are_told_to_come_back",
    ),
    Mutant(
        "schema-one-level-deeper",
        "a schema that is nested deeper than the bound is refused before anything reads it",
        "core/types/constraint.py",
        "    for _ in range(limit):\n",
        "    for _ in range(limit + 1):\n",
        "tests/types/test_constraint.py::test_a_schema_is_nested_no_deeper_than_the_bound",
    ),
    Mutant(
        "half-an-escape-reaches-the-library",
        "an expression that ends in a lone backslash is refused by name",
        "core/types/constraint.py",
        '    elif (len(source) - len(source.rstrip("\\\\"))) % 2:\n',
        '    elif (len(source) - len(source.rstrip("\\\\"))) % 2 > 1:\n',
        "tests/types/test_constraint.py::test_an_expression_does_not_end_in_half_an_escape",
    ),
    Mutant(
        "raw-control-characters-in-json",
        "an output of a JSON schema is JSON: no string holds a raw control character",
        XGRAMMAR,
        "self._printable if is_json else None",
        "self._printable if not is_json else None",
        "tests/constraints/test_xgrammar_masks.py::test_json_holds_no_raw_control_character_and_other_texts_may",
    ),
    Mutant(
        "end-stays-behind-a-rollback",
        "what was taken for an output that is computed again is given back by either library, its end too",
        XGRAMMAR,
        "        self.has_ended = self.has_ended and count == 0\n",
        "",
        "tests/constraints/test_xgrammar_masks.py::test_an_end_is_given_back_with_its_token",
    ),
)
