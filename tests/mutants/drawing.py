"""Mutants of sampling: which tokens a row may take, which it takes, and what is told of their probabilities."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "tests/sampling/test_kept_sets.py::"
SAMPLER = "tests/sampling/test_sampler.py::"
PENALTIES = "core/sampling/penalties.py"

DRAWING: tuple[Mutant, ...] = (
    Mutant(
        "nucleus-falls-short",
        "top-p keeps the fewest tokens that reach its share, and never fewer",
        "core/sampling/cutoff.py",
        "(top_ps * total).ceil_()",
        "(top_ps * total).floor_()",
        KEPT + "test_nucleus_is_the_smallest_that_reaches_top_p",
    ),
    Mutant(
        "cut-ties-look-done",
        "top-p counts every token that top-k left, also ties beyond the first candidates",
        "core/sampling/candidates.py",
        " & (~k_on | ~p_on | (last < k_cut))",
        "",
        KEPT + "test_top_p_counts_all_ties_that_top_k_kept",
    ),
    Mutant(
        "draw-runs-off-the-end",
        "the largest uniform still draws a token that may be drawn",
        "core/sampling/draw.py",
        "torch.minimum((uniforms * total).floor_(), total - 1).clamp_min_(0)",
        "(uniforms * total).floor_()",
        SAMPLER + "test_uniform_beyond_its_range_still_gives_a_kept_token",
    ),
    Mutant(
        "sure-token-of-no-weight",
        "a token that a filter dropped is never drawn, also at uniform 0",
        "core/sampling/draw.py",
        "torch.searchsorted(cdf, target[:, None], right=True)",
        "torch.searchsorted(cdf, target[:, None])",
        SAMPLER + "test_mostly_forbidden_rows_are_finite",
    ),
    Mutant(
        "ties-list-higher-ids-first",
        "alternatives of equal probability are listed by rising id, whatever the neighbours ask for",
        "core/sampling/logprobs.py",
        "    keys += torch.arange(logprobs.shape[1] - 1, -1, -1, device=logprobs.device)\n"
        "    best, _ = largest(keys, min(count, logprobs.shape[1]))\n"
        "    return logprobs.shape[1] - 1 - (best & 0xFFFFFFFF)",
        "    keys += torch.arange(logprobs.shape[1], device=logprobs.device)\n"
        "    best, _ = largest(keys, min(count, logprobs.shape[1]))\n"
        "    return best & 0xFFFFFFFF",
        "tests/sampling/test_logprobs.py::test_alternatives_fall_and_ties_list_lower_ids_first",
    ),
    Mutant(
        "bias-replaces-the-ban",
        "a client's bias does not lift what min_tokens forbids",
        PENALTIES,
        "logits.index_put_((rows, tokens), values, accumulate=True)",
        "logits[rows, tokens] = logits[rows, tokens] + values",
        SAMPLER + "test_forbidden_tokens_are_never_drawn",
    ),
    Mutant(
        "leftovers-are-penalised",
        "penalties count the tokens of a row's own request, and none of a former owner",
        PENALTIES,
        "    tokens = torch.where(valid, tokens, tokens[:, :1])\n",
        "",
        "tests/sampling/test_penalties.py::test_leftovers_of_an_earlier_owner_do_not_count",
    ),
    Mutant(
        "samples-repeat-each-other",
        "the outputs of one request draw from different random numbers",
        "core/sampling/uniform.py",
        "    word = _mix(_mix(np.array([seed], np.uint64) + _INDEX_GAMMA) + counter)\n",
        "    word = np.array([seed], np.uint64) + np.uint64(0) * counter\n",
        "tests/sampling/test_uniform.py::test_derived_seeds",
    ),
    Mutant(
        "position-reuses-the-draw",
        "each position of an output has a random number of its own",
        "core/sampling/uniform.py",
        "(_words(positions) + np.uint64(1)) * _GAMMA",
        "(_words(positions) // np.uint64(2) + np.uint64(1)) * _GAMMA",
        "tests/sampling/test_uniform.py::test_values_are_pinned",
    ),
)
