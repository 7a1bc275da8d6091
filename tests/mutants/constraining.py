"""Mutants of structured output: law 14, and that a matcher follows one owner of a row."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TABLE = "core/executor/grammar_table.py"
WORK = "core/executor/grammar_work.py"
STEP_KINDS = "tests/happens_before/test_step_kinds.py"
FOLLOWED = f"{STEP_KINDS}::test_constrained_tokens_follow_each_other"

CONSTRAINING: tuple[Mutant, ...] = (
    Mutant(
        "mask-before-the-token",
        "law 14: the mask is made when the token before is on the host",
        TABLE,
        "        last.copy_done.synchronize()\n",
        "",
        FOLLOWED,
    ),
    Mutant(
        "matcher-of-a-former-owner",
        "law 1: a token in flight is accepted by the owner of the row that it was sampled for",
        TABLE,
        "follower is None or follower.generation != generation or follower.failed is not None",
        "follower is None or follower.failed is not None",
        FOLLOWED,
    ),
    Mutant(
        "matcher-forgets-outputs",
        "a retracted request goes on behind what it has",
        WORK,
        "        for token in seed.outputs.tolist():",
        "        for token in seed.outputs.tolist()[:0]:",
        FOLLOWED,
    ),
    Mutant(
        "bias-lifts-the-mask",
        "the mask wins over logit bias",
        "core/sampling/sampler.py",
        "        if mask is not None:",
        "        if mask is not None and not len(batch.bias_rows):",
        "tests/constraints/test_mask.py",
    ),
    Mutant(
        "cache-without-eviction",
        "compiled constraints stay within their bytes",
        "core/engine/grammar/cache.py",
        "        while self.used_bytes + size > self.max_bytes:",
        "        while self.used_bytes + size > self.max_bytes and not self._entries:",
        "tests/constraints/test_grammars.py::test_ten_thousand_schemas_stay_within_the_bytes",
    ),
    Mutant(
        "mask-time-of-the-wall",
        "a stalled host fails no request",
        WORK,
        "            began = time.thread_time()\n            some[place] = follower.matcher.fill(words[place])\n"
        "            self._charge(follower, follower.accepting + time.thread_time() - began)",
        "            began = time.monotonic()\n            some[place] = follower.matcher.fill(words[place])\n"
        "            self._charge(follower, follower.accepting + time.monotonic() - began)",
        "tests/constraints/test_endings.py::test_a_host_that_stalls_fails_nobody",
    ),
    Mutant(
        "mask-work-unbounded",
        "a grammar that works too long fails its request",
        WORK,
        "            self._charge(follower, follower.accepting + time.thread_time() - began)\n",
        "",
        "tests/constraints/test_endings.py::test_masks_that_take_too_long_fail_their_request_alone",
    ),
    Mutant(
        "trial-time-of-the-wall",
        "a constraint is refused for its work, not for the machine's",
        "core/engine/grammar/bounded_work.py",
        "looks + 1, seconds - (used() - began)",
        "looks + 1, 0.0",
        "tests/engine/test_grammar_trial.py::test_a_process_that_is_stopped_refuses_nothing",
    ),
    Mutant(
        "probe-time-of-the-wall",
        "a mask is too slow for its work alone",
        "core/sampling/grammar/trial.py",
        "        some = matcher.fill(words)\n",
        "        clock = time.monotonic()\n        some = matcher.fill(words)\n"
        "        began -= time.monotonic() - clock\n",
        "tests/engine/test_grammar_trial.py::test_masks_are_judged_by_their_work",
    ),
    Mutant(
        "special-tokens-spelled",
        "no constraint quotes a special token",
        "core/sampling/grammar/spelling.py",
        'names[token["content"]] = token["content"] = special_name(str(token["id"]))',
        'names[token["content"]] = token["content"]',
        "tests/constraints/test_spelling.py::test_quoted_special_tokens_are_spelled_out[llguidance-choice]",
    ),
    Mutant(
        "spelled-beyond-the-logits",
        "a text is spelled in tokens that the model has logits for",
        "core/sampling/grammar/spelling.py",
        "for piece, index in pieces.items() if index < size}",
        "for piece, index in pieces.items()}",
        "tests/constraints/test_spelling.py::test_every_kind_of_model_loses_its_newest_token[WordPiece]",
    ),
    Mutant(
        "special-tokens-are-text",
        "a special token is not one of those that make free text",
        "core/sampling/grammar/xgrammar_backend.py",
        '"" if index in special else token',
        "token",
        "tests/constraints/test_spelling.py::test_free_text_has_no_special_tokens[xgrammar]",
        needs="xgrammar",
    ),
)
