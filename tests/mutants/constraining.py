"""Mutants of structured output: law 14, and that a matcher follows one owner of a row."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TABLE = "core/executor/grammar_table.py"
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
        "follower is None or follower.generation != generation or follower.failed",
        "follower is None or follower.failed",
        FOLLOWED,
    ),
    Mutant(
        "matcher-forgets-outputs",
        "a retracted request goes on behind what it has",
        TABLE,
        "    for token in seed.outputs.tolist():",
        "    for token in seed.outputs.tolist()[:0]:",
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
        "core/engine/grammar_cache.py",
        "        while self.used_bytes + size > self.max_bytes:",
        "        while self.used_bytes + size > self.max_bytes and not self._entries:",
        "tests/constraints/test_grammars.py::test_ten_thousand_schemas_stay_within_the_bytes",
    ),
)
