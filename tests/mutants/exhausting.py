"""Mutants of what a shortage of memory ends."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "tests/engine/test_short_of_memory.py::"
SPLITTING = "tests/sampling/test_splitting.py::"
SAMPLER = "core/sampling/sampler.py"

EXHAUSTING: tuple[Mutant, ...] = (
    Mutant(
        "biased-twice",
        "a retry adds a bias once",
        SAMPLER,
        "            scored.is_biased = True\n",
        "",
        SPLITTING + "test_every_allocation_may_fail[False-False-True]",
    ),
    Mutant(
        "penalised-twice",
        "a retry applies a penalty once",
        SAMPLER,
        "            scored.is_penalised = True\n",
        "",
        SPLITTING + "test_every_allocation_may_fail[False-False-True]",
    ),
    Mutant(
        "divided-twice",
        "a retry divides by a temperature once",
        SAMPLER,
        "        scored.divided = max(scored.divided, start + len(places))\n",
        "",
        SPLITTING + "test_every_allocation_may_fail[True-False-True]",
    ),
    Mutant(
        "pieces-pay-for-their-neighbours",
        "a row is not ended for what another row asked for",
        "core/sampling/splitting.py",
        "top_logprobs=int(wanted.max(initial=0)),",
        "top_logprobs=batch.top_logprobs,",
        SPLITTING + "test_a_row_that_does_not_fit_alone_is_given_up_alone",
    ),
    Mutant(
        "given-up-in-silence",
        "a row that does not fit alone ends its request",
        "core/executor/sampling_step.py",
        "_exhausted(batch, np.union1d(lost, pieces.given_up))",
        "_exhausted(batch, lost)",
        ENGINE + "test_a_row_that_does_not_fit_alone_ends_alone",
    ),
    Mutant(
        "penalties-without-history",
        "a request whose history could not be put down is not served without its penalties",
        "core/executor/sampling_step.py",
        "            return SampledRows(output, status, _exhausted(batch, lost))",
        "            return SampledRows(output, status)",
        ENGINE + "test_the_history_of_penalties_fails_those_with_penalties",
    ),
    Mutant(
        "lost-row-keeps-a-penalty",
        "a row whose history could not be put down has no penalty of any kind",
        "core/executor/sampling_step.py",
        "repetition[lost], frequency[lost], presence[lost] = 1.0, 0.0, 0.0",
        "repetition[lost], frequency[lost] = 1.0, 0.0",
        "tests/engine/test_short_of_memory.py::test_the_history_of_penalties_fails_those_with_penalties",
    ),
    Mutant(
        "unseeded-row-for-ever",
        "the next owner of a row is not charged with the shortage of the last",
        "core/executor/sampling_step.py",
        "            self._unseeded.difference_update(batch.fresh_rows.tolist())",
        "            pass",
        ENGINE + "test_the_history_of_penalties_fails_those_with_penalties",
    ),
    Mutant(
        "embedding-waits-for-ever",
        "an embedding without memory ends",
        "core/executor/step.py",
        "rows.exhausted if vectors is not None else rows.exhausted.beside(embedded(batch))",
        "rows.exhausted",
        ENGINE + "test_embeddings_without_memory_end_and_the_tokens_beside_them_do_not",
        dies_by="timeout",
    ),
    Mutant(
        "death-without-a-figure",
        "a death for want of memory says how much was missing",
        "core/executor/step.py",
        "            raise out_of_memory(error, batch, self._state.streams.device) from error",
        "            raise",
        ENGINE + "test_a_forward_pass_without_memory_says_how_much_was_missing",
    ),
    Mutant(
        "shortage-of-an-unknown-amount",
        "a step without memory says how much was wanted",
        "core/device/shortage.py",
        '"an unknown amount" if found is None else (found[1] or found[2])',
        '"an unknown amount"',
        ENGINE + "test_a_forward_pass_without_memory_says_how_much_was_missing",
    ),
    Mutant(
        "shortage-without-the-options",
        "a death for want of memory says what the step was asked for",
        "core/executor/exhaustion.py",
        '"penalties": sampling.any_penalty,',
        '"penalties": False,',
        ENGINE + "test_a_forward_pass_without_memory_says_how_much_was_missing",
    ),
)
