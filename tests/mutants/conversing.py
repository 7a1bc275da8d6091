"""Mutants of what a client gets word by word: text, stop strings, streams, and what is asked of them at the door."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DETOKENIZER = "core/text/detokenizer.py"
STOP = "core/text/stop.py"
TURNSTILE = "tests/engine/test_turnstile.py::"
STOPS = "tests/text/test_stop.py::"
TEXT = "tests/text/test_detokenizer.py::"

CONVERSING: tuple[Mutant, ...] = (
    Mutant(
        "half-a-character-shown",
        "no piece of text ends inside a character",
        DETOKENIZER,
        'return self._cut(text) if too_long else ""',
        "return self.flush()",
        TEXT + "test_rows_of_replacement_characters",
    ),
    Mutant(
        "beginning-of-a-stop-string-shown",
        "text that may become a stop string is withheld until it cannot",
        STOP,
        "shown = len(seen) - self._automaton.depths[self._state]",
        "shown = len(seen)",
        STOPS + "test_examples",
    ),
    Mutant(
        "stop-inside-a-stop-missed",
        "an output ends at the first stop string that is complete, also inside the beginning of another",
        STOP,
        "                self._matches[state] = self._matches[fallback]\n",
        "                pass\n",
        STOPS + "test_examples",
    ),
    Mutant(
        "error-before-the-tokens",
        "a stream that fails gives what it had before it tells the error",
        "core/engine/streams/token_stream.py",
        "        event = self._next_ready()\n        if event is not None or self._ended:",
        "        event = None if self._error else self._next_ready()\n        if event is not None or self._ended:",
        "tests/engine/test_trouble.py::test_a_reader_that_does_not_read_is_ended_and_others_are_not",
    ),
    Mutant(
        "turnstile-one-too-many",
        "no more readers than the bound run in one pass of the loop",
        "core/engine/streams/reader_turns.py",
        "if self._passed >= self._width:",
        "if self._passed > self._width:",
        TURNSTILE + "test_a_step_for_many_lets_few_read_in_one_pass",
    ),
    Mutant(
        "stage-of-the-slowest-output",
        "a request is shown where its furthest output is",
        "core/engine/streams/open_streams.py",
        "furthest = max(furthest, PREFILL if req.first_token_at is None else DECODE)",
        "furthest = PREFILL if req.first_token_at is None else DECODE",
        "tests/engine/test_open_streams.py::test_a_request_is_where_its_furthest_output_is",
    ),
    Mutant(
        "inputs-of-an-embedding-uncounted",
        "the prompt tokens of an embedding are those of all its inputs",
        "core/engine/streams/open_streams.py",
        "        if first.pooling is not None:\n",
        "        if first.pooling is None:\n",
        "tests/engine/test_open_streams.py::test_tokens_of_all_outputs_count_and_prompts_once_unless_they_differ",
    ),
    Mutant(
        "not-a-number-is-served",
        "an option that is not a number is refused by name",
        "core/types/sampling_params.py",
        "            if not (low <= value <= high)\n",
        "            if value < low or value > high\n",
        "tests/types/test_sampling_params.py::test_an_option_is_served_up_to_its_bounds",
    ),
    Mutant(
        "only-the-first-bad-field",
        "all bad fields of a request are named at once",
        "core/errors.py",
        "        self.violations = tuple(violations)\n",
        "        self.violations = tuple(violations[:1])\n",
        "tests/types/test_errors.py::test_an_invalid_request_names_all_its_fields_at_once",
    ),
    Mutant(
        "aborted-while-it-arrived-and-served",
        "a request that is aborted while it is tokenised is never queued",
        "core/engine/pending_admissions.py",
        "        if ended.done():\n            raise ended.result()\n\n    def abort",
        "\n    def abort",
        "tests/engine/test_arrivals.py::test_a_request_that_was_aborted_while_it_arrived_does_not_get_through",
    ),
    Mutant(
        "ended-request-keeps-its-work",
        "a request that ends before it is queued lets go of the work that it waited for",
        "core/engine/pending_admissions.py",
        "            task.cancel()\n            if task.done()",
        "            if task.done()",
        "tests/engine/test_arrivals.py::test_a_request_that_ends_lets_go_of_what_it_waited_for",
    ),
    Mutant(
        "loop-task-spins",
        "a wake-up serves one wait: the engine's loop sleeps while there is nothing to do",
        "core/engine/wakeup.py",
        "        self._set = False\n\n    def close",
        "\n    def close",
        "tests/engine/test_wakeup.py::test_a_wake_up_before_the_wait_is_not_lost_and_serves_one_wait",
    ),
    Mutant(
        "loop-task-starves-the-others",
        "other tasks run before the engine's loop goes on, however busy it is",
        "core/engine/wakeup.py",
        "            await asyncio.sleep(0)\n",
        "            pass\n",
        "tests/engine/test_wakeup.py::test_others_run_before_a_wait_returns_however_often_it_is_set",
    ),
    Mutant(
        "old-alarm-left-behind",
        "an alarm that is not needed any more wakes nothing",
        "core/engine/wakeup.py",
        "                    timer.cancel()\n",
        "                    pass\n",
        "tests/engine/test_wakeup.py::test_a_wait_ends_at_its_time_and_an_earlier_one_leaves_no_alarm_behind",
    ),
)
