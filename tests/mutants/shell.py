"""Mutants of executors, engine and streams."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "tests/engine/test_async_engine.py::"
TROUBLE = "tests/engine/test_trouble.py::"
EXECUTOR = "tests/executor/test_executors.py::"

SHELL: tuple[Mutant, ...] = (
    Mutant(
        "depth-three",
        "law 10: at most two steps in flight",
        "core/executor/interface.py",
        "MAX_DEPTH = 2",
        "MAX_DEPTH = 3",
        EXECUTOR + "test_a_third_step_in_flight_is_refused",
    ),
    Mutant(
        "results-overtake",
        "results arrive in submission order",
        "core/executor/completion.py",
        "direct = self._pending == 0 and (",
        "direct = (",
        EXECUTOR + "test_completion_keeps_order_across_its_two_paths",
    ),
    Mutant(
        "run-on-after-a-failure",
        "steps behind a failed one do not run",
        "core/executor/forward_thread.py",
        "            return error\n",
        "            return None\n",
        EXECUTOR + "test_a_failed_step_fails_those_behind_it_and_nothing_hangs",
    ),
    Mutant(
        "slow-reader-kept",
        "unread tokens are bounded",
        "core/engine/output_processor.py",
        "if len(record.ids) > self._max_pending and not record.done:",
        "if False:",
        TROUBLE + "test_a_reader_that_does_not_read_is_ended_and_others_are_not",
    ),
    Mutant(
        "queue-unbounded",
        "the waiting queue is bounded",
        "core/engine/async_engine.py",
        "if queued + request.sampling.n > self._config.scheduler.max_queued_requests:",
        "if False:",
        TROUBLE + "test_full_queue_refuses_at_once",
    ),
    Mutant(
        "duplicates-admitted",
        "a live id is unique",
        "core/engine/async_engine.py",
        "if request_id in self._live or request_id in self._arriving:",
        "if False:",
        ENGINE + "test_duplicate_of_a_live_id_is_refused_and_free_again_afterwards",
    ),
    Mutant(
        "entry-with-another-formula",
        "what entry admits, the pool can hold",
        "core/engine/input_processor.py",
        "pool_tokens - prompt_len + 1)",
        "pool_tokens - prompt_len + 2)",
        TROUBLE + "test_what_never_fits_the_pool_is_refused_and_what_just_fits_is_served",
    ),
    Mutant(
        "vocabulary-unchecked",
        "an id outside the vocabulary never reaches a batch",
        "core/engine/input_processor.py",
        "        if len(bad):\n",
        "        if False:\n",
        TROUBLE + "test_bad_input_names_its_field_and_harms_nobody",
    ),
    Mutant(
        "watchdog-asleep",
        "a step that never comes back is noticed",
        "core/engine/async_engine.py",
        "elif now - since > self._config.executor.hang_timeout:",
        "elif now < since:",
        TROUBLE + "test_hanging_forward_is_noticed",
    ),
    Mutant(
        "dead-engine-keeps-streams",
        "every stream of a dead engine ends",
        "core/engine/async_engine.py",
        '        self._fail_streams(EngineDead("the engine failed; this server is going away"))\n',
        "",
        TROUBLE + "test_failing_forward_ends_every_stream_and_the_engine",
    ),
    Mutant(
        "stop-text-leaks",
        "a matched stop string is withheld",
        "core/engine/output.py",
        "        self._text += emitted\n        return matched\n",
        "        self._text += text\n        return matched\n",
        ENGINE + "test_stop_string_ends_withholds_and_frees",
    ),
    Mutant(
        "min-tokens-without-stop-strings",
        "min_tokens also holds back stop strings",
        "core/engine/output_processor.py",
        "match_stops=record.tokens + 1 >= req.params.min_tokens,",
        "match_stops=True,",
        ENGINE + "test_min_tokens_also_holds_back_stop_strings",
    ),
    Mutant(
        "wall-clock-deadline",
        "durations are measured with a monotonic clock",
        "core/engine/async_engine.py",
        "            now = time.monotonic()\n            self._refuse_if_late_or_full(request, now)\n",
        "            now = time.time()\n            self._refuse_if_late_or_full(request, now)\n",
        "tests/tidy/test_style.py",
    ),
    Mutant(
        "stop-token-told-by-request",
        "only the stop token itself has no text",
        "core/engine/output_processor.py",
        "textless=stops.get(id(req)) == step.positions[i] and",
        "textless=id(req) in stops and",
        "tests/engine/test_output_processor.py::test_only_the_stop_token_has_no_text",
    ),
)
