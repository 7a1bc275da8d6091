"""Mutants of what makes and reads text: tokenizers that fail, ids without text, and the command line around them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAILURES = "tests/engine/test_text_failures.py::"
READ = FAILURES + "test_text_that_cannot_be_made_ends_its_request_alone[read-value_error]"
FOREIGN = "tests/engine/test_foreign_ids.py::"
WAITING = "tests/service/test_waiting.py::"

TEXTING: tuple[Mutant, ...] = (
    Mutant(
        "text-failure-forgets-the-rows",
        "a request whose text failed gives back its rows",
        "core/engine/streams/output_processor.py",
        "        self._end_all(stream, failure)\n",
        "",
        FAILURES + "test_siblings_of_a_failed_output_end_with_it[read-value_error]",
    ),
    Mutant(
        "text-failure-untold",
        "a stream whose text failed ends with that error",
        "core/engine/streams/output_processor.py",
        "        stream.fail(failure)\n",
        "",
        FAILURES + "test_text_that_fails_at_the_end_of_its_output[value_error]",
    ),
    Mutant(
        "text-failure-with-a-good-end",
        "an output whose text failed has no good end",
        "core/engine/streams/pending_output.py",
        "if not self._given_up:",
        "if True:",
        FAILURES + "test_text_that_fails_with_the_last_token_has_no_good_end",
    ),
    Mutant(
        "text-failure-quoted",
        "the log has no text of a client",
        "core/text/failures.py",
        "type(error).__name__, place)",
        "repr(error), place)",
        READ,
    ),
    Mutant(
        "text-failure-counted-never",
        "failures of the tokenizer are counted",
        "core/text/failures.py",
        "self.count += 1",
        "self.count += 0",
        READ,
    ),
    Mutant(
        "broken-invariant-is-a-text-failure",
        "what the engine finds wrong with itself is no failure of a tokenizer",
        "core/text/failures.py",
        "    InvariantViolation,\n",
        "",
        "tests/text/test_failures.py::test_what_is_no_failure_of_a_tokenizer_passes",
    ),
    Mutant(
        "panic-is-no-failure",
        "a panic in a Rust library is a failure of the tokenizer",
        "core/text/failures.py",
        "return not isinstance(error, PASSED)",
        "return isinstance(error, Exception) and not isinstance(error, PASSED)",
        READ.replace("value_error", "panic"),
    ),
    Mutant(
        "unknown-ids-decoded",
        "ids outside the vocabulary add nothing",
        "core/text/tokenizer.py",
        "known = [token for token in ids if token in self._known]",
        "known = list(ids)",
        "tests/text/test_python_tokenizers.py::test_a_python_tokenizer_passes_over_ids_it_does_not_know",
    ),
    Mutant(
        "whole-prompt-converted",
        "an output costs its entry the end of the prompt, not all of it",
        "core/engine/streams/pending_output.py",
        "req.prompt[-MAX_CONTEXT:].tolist()",
        "req.prompt.tolist()",
        "tests/engine/test_entry_work.py::test_outputs_of_a_long_prompt_convert_only_the_end_of_it",
    ),
    Mutant(
        "foreign-ends-kept",
        "an end without a logit is left out",
        "core/models/config.py",
        "tuple(token for token in checkpoint.eos_token_ids if 0 <= token < vocab_size)",
        "checkpoint.eos_token_ids",
        "tests/models/test_config.py::test_ends_without_a_logit_are_left_out",
    ),
    Mutant(
        "foreign-ids-unchecked",
        "bias_in_logits: every id that a request biases, forbids or forces has a logit",
        "core/scheduler/sampling_table.py",
        'check("bias_in_logits", inside,',
        'check("bias_in_logits", True,',
        FOREIGN + "test_an_index_outside_the_logits_is_stopped_before_the_device",
    ),
    Mutant(
        "loading-not-waited-for",
        "commands wait for a server that loads",
        "service/client/client.py",
        "state == pb.SERVER_STATE_STARTING",
        "state == pb.SERVER_STATE_DEAD",
        WAITING + "test_waiting_ends_with_advice_and_a_status",
    ),
    Mutant(
        "text-refused-by-place",
        "a text with a token without a logit is refused as a text, not as an id",
        "core/engine/input_processor.py",
        "self._refuse_foreign_tokenisation(field, prompt)",
        "self._refuse_foreign_ids(field, prompt)",
        FOREIGN + "test_a_text_with_a_token_that_has_no_logit_is_refused_as_a_text",
    ),
    Mutant(
        "negative-end-untold",
        "an end that is left out is told, a negative one as well",
        "core/models/config.py",
        "if not 0 <= token < vocab_size]",
        "if token >= vocab_size]",
        "tests/models/test_config.py::test_a_negative_end_is_left_out_and_told_like_one_that_is_too_large",
    ),
)
