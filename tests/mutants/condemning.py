"""Mutants of what becomes of a request that failed, of rows whose input was wrong, and of what outlives a request."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONDEMNED = "tests/scheduler/test_condemned.py::"
EXPIRIES = "tests/scheduler/test_expiries.py::"
GAPS = "tests/scheduler/test_token_gaps.py::"
CHECKED = "tests/executor/test_violated_rows.py::"
CACHE = "tests/prefix/test_condemned.py::"

CONDEMNING: tuple[Mutant, ...] = (
    Mutant(
        "failed-request-is-cached",
        "nothing that a failed request computed is found by a later one",
        "core/scheduler/lifecycle.py",
        "written if keep else written[:0]",
        "written",
        CONDEMNED + "test_what_it_decoded_goes_where_its_prompt_was_no_page",
    ),
    Mutant(
        "early-offers-stay",
        "pages that a failed request offered while it computed go",
        "core/memory/request_memory.py",
        "            self._free(self.cache.condemn(doubt.node))\n",
        "            pass\n",
        CONDEMNED + "test_where_it_fails_first_everything_goes",
    ),
    Mutant(
        "own-pages-count-as-found",
        "what a request computed before it gave way is its own",
        "core/scheduler/lifecycle.py",
        "req.computed_from = min(req.computed_from, admission.cached_tokens)",
        "req.computed_from = admission.cached_tokens",
        CONDEMNED + "test_pages_of_an_earlier_admission_go_as_well",
    ),
    Mutant(
        "victims-are-blamed-first",
        "of two bad rows the one fails that the other read",
        "core/scheduler/result_processor.py",
        "key=lambda place: self._memory.shared(",
        "key=lambda place: -self._memory.shared(",
        CONDEMNED + "test_the_owner_of_shared_pages_is_blamed_and_not_its_readers",
    ),
    Mutant(
        "nobody-need-vouch",
        "pages that no finite logits came of go with their first victim",
        "core/memory/request_memory.py",
        "computed_from if sound.all() else min(",
        "computed_from if True else min(",
        CONDEMNED + "test_a_prefix_that_nobody_vouched_for_goes_with_its_first_victim",
    ),
    Mutant(
        "finite-logits-vouch-for-nothing",
        "a system prompt stays when one request behind it fails",
        "core/scheduler/result_processor.py",
        "            self._memory.vouch(row, int(running.known[row]))\n",
        "            pass\n",
        CONDEMNED + "test_a_prefix_that_gave_finite_logits_stays",
    ),
    Mutant(
        "vouched-for-for-ever",
        "a page that changes hands is unproved again",
        "core/memory/request_memory.py",
        "        self._sound[pages] = False\n",
        "",
        CONDEMNED + "test_a_page_is_vouched_for_by_its_own_logits_only",
    ),
    Mutant(
        "step-in-flight-is-cached",
        "only tokens whose steps have answered are kept for others",
        "core/scheduler/running.py",
        "known - self.has_sampled(row)",
        "known",
        CONDEMNED + "test_tokens_that_no_result_vouches_for_are_not_cached",
    ),
    Mutant(
        "failed-embedding-is-cached",
        "an embedding without finite numbers leaves nothing",
        "core/scheduler/result_processor.py",
        "self._lifecycle.condemn(req, error)",
        "self._lifecycle.end(Ended(req, error=error))",
        CONDEMNED + "test_a_failed_embedding_leaves_nothing",
    ),
    Mutant(
        "siblings-go-on-below",
        "what is below a condemned page goes with it",
        "core/prefix/radix.py",
        "        doomed = list(node.below())\n",
        "        doomed = [each for each in node.below() if not each.children]\n",
        CACHE + "test_random_trees",
    ),
    Mutant(
        "violated-row-is-served",
        "a row whose token was lost fails",
        "core/scheduler/result_processor.py",
        "result.non_finite if result.violated is None else result.non_finite | result.violated",
        "result.non_finite",
        CONDEMNED + "test_nothing_of_a_failed_request_is_found[0-violated]",
    ),
    Mutant(
        "lost-token-marks-no-row",
        "a read without a write names its row in the step's result",
        "core/device/checks.py",
        "    violated.logical_or_(unwritten)\n",
        "",
        CHECKED + "test_an_unwritten_token_marks_its_row[False]",
    ),
    Mutant(
        "mark-is-left-over",
        "a row is marked for its own step only",
        "core/device/checks.py",
        "torch.ne(actual, expected, out=violated)",
        "violated.logical_or_(actual != expected)",
        CHECKED + "test_an_unwritten_token_marks_its_row[False]",
    ),
    Mutant(
        "captured-mark-is-lost",
        "a replayed step marks its rows where the host looks",
        "core/relay/future_map.py",
        "        return self._violated[:count]\n",
        "        return self._violated[:count].clone()\n",
        CHECKED + "test_another_length_marks_its_row[True]",
    ),
    Mutant(
        "request-held-until-its-deadline",
        "a request that ended is let go",
        "core/scheduler/scheduler.py",
        "            self.intake.forget(terminal.req)\n",
        "",
        EXPIRIES + "test_finished_requests_are_not_held_until_their_deadline",
    ),
    Mutant(
        "instants-pile-up",
        "instants of requests that ended are swept out",
        "core/scheduler/intake.py",
        "if len(self._expiries) > 4 * len(self._expiring) + FEW:",
        "if False:",
        EXPIRIES + "test_instants_of_those_that_left_are_few",
    ),
    Mutant(
        "loop-wakes-for-the-dead",
        "the loop sleeps until a live request may expire",
        "core/scheduler/intake.py",
        "while self._expiries and self._expiries[0][1] not in self._expiring:",
        "while False:",
        EXPIRIES + "test_the_loop_is_not_woken_for_those_that_left",
    ),
    Mutant(
        "stream-holds-its-requests",
        "a stream that is kept does not keep the prompt",
        "core/engine/async_engine.py",
        "            stream.reqs = []\n",
        "            pass\n",
        "tests/engine/test_released_requests.py::test_a_prompt_goes_with_its_request",
    ),
    Mutant(
        "gap-of-another-owner",
        "the time between two tokens is the request's, over retractions",
        "core/scheduler/running.py",
        "        self.last_token_at[row] = req.last_token_at\n",
        "",
        GAPS + "test_a_retraction_is_part_of_the_gap",
    ),
    Mutant(
        "gap-begins-at-the-retraction",
        "the time of the last token leaves with the request",
        "core/scheduler/running.py",
        "        req.last_token_at = float(self.last_token_at[row])\n",
        "",
        GAPS + "test_a_row_tells_its_next_owner_nothing",
    ),
)
