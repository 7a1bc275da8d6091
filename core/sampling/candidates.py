"""Filtered sampling on the CPU: look at the 64 largest logits, and sort only the rows whose kept set is larger.

Most nuclei hold a few dozen tokens. Rows whose kept set provably lies within the first candidates are drawn from those.
Flat distributions (random weights have nuclei of a thousand tokens and more) need a sort. Whether a row is done is read
on the host, which is free on the CPU and would be a wait on an accelerator.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from core.sampling.cutoff import SampledRows, keyed_values, nucleus_mass, ordered_keys
from core.sampling.draw import draw, draw_among, totals

FIRST: Final = 64
"""Candidates of the first look."""
GROUP: Final = 32
"""Tokens per group of the preselection in `largest`; divides every padded width."""


def draw_rows(rows: SampledRows) -> torch.Tensor:
    """Token ids int64[n]: rows with a filter from their candidates, the others from the whole vocabulary. CPU only."""
    active = rows.filters.active
    if active.all():
        return _draw_filtered(rows)
    tokens = torch.empty(len(active), dtype=torch.int64)
    for mask, pick in ((active, _draw_filtered), (~active, _draw_unfiltered)):
        places = np.flatnonzero(mask)
        if len(places):
            tokens[torch.from_numpy(places)] = pick(rows.take(places))
    return tokens


def _draw_filtered(rows: SampledRows) -> torch.Tensor:
    """Token ids int64[n]; rows whose largest logit is not finite get an id that means nothing."""
    # One candidate more than top-k asks for: whether the k-th has ties can only be seen from the next value.
    few = np.flatnonzero(rows.filters.top_ks < FIRST)
    tokens = torch.zeros(len(rows.scaled), dtype=torch.int64)
    done = np.zeros(len(tokens), np.bool_)
    if len(few):
        tokens[torch.from_numpy(few)], done[few] = _draw_from_largest(rows.take(few))
    rest = np.flatnonzero(~done)
    if len(rest):
        tokens[torch.from_numpy(rest)] = _draw_from_sorted(rows.take(rest))
    return tokens


def largest(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [n, size] in descending order and ids int64[n, size] of the `size` largest entries per row of [n, W].

    Works for any dtype, on any device. Which of several equal entries are listed at the end is left open. With few
    wanted among many, only the `size` groups with the largest maxima are searched: an entry outside them has `size`
    entries above or equal to it.
    """
    n, width = rows.shape
    if size * GROUP * 4 > width or width % GROUP:
        return rows.topk(size)
    groups = rows.view(n, -1, GROUP)
    best = groups.amax(-1).topk(size, sorted=False).indices
    values, places = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP)).view(n, -1).topk(size)
    return values, best.gather(1, places // GROUP) * GROUP + places % GROUP


def descending(scaled: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both float32[n, W] in descending order of `scaled`, the weights as float64[n, W].

    Value and weight are sorted as one 64-bit number, by numpy, whose vectorised integer sort is several times faster
    than sorting values with their indices and gathering afterwards.
    """
    packed = ordered_keys(scaled).numpy().astype(np.int64) << 32
    packed |= weights.view(torch.int32).numpy()
    packed.sort(-1)
    packed = np.ascontiguousarray(packed[:, ::-1])
    keys = torch.from_numpy((packed >> 32).astype(np.int32))
    masses = torch.from_numpy(packed.astype(np.int32)).view(torch.float32)
    return keyed_values(keys), masses.double()


def _draw_unfiltered(rows: SampledRows) -> torch.Tensor:
    return draw(rows.weights, rows.uniforms)


def _draw_from_largest(rows: SampledRows) -> tuple[torch.Tensor, np.ndarray]:
    """Tokens int64[n] drawn from the first candidates, and bool[n]: which rows' kept tokens were all among them."""
    values, ids = largest(rows.scaled, min(FIRST, rows.scaled.shape[1]))
    masses = rows.weights.gather(1, ids).double()
    cutoffs, done = _cutoffs(rows, values, masses)
    masses.masked_fill_(values < cutoffs[:, None], 0.0)
    return draw_among(ids, masses, rows.uniforms), done.numpy()


def _draw_from_sorted(rows: SampledRows) -> torch.Tensor:
    """Tokens int64[n] of rows that keep more than a few; only those with top-k or top-p have to be sorted."""
    cutoffs = rows.tops + torch.from_numpy(rows.filters.floors)
    ranked = np.flatnonzero((rows.filters.top_ks > 0) | (rows.filters.top_ps < 1.0))
    if len(ranked):
        some = rows.take(ranked)
        cutoffs[torch.from_numpy(ranked)], done = _cutoffs(some, *descending(some.scaled, some.weights))
        assert bool(done.all()), "every token is a candidate"
    # In numpy because PyTorch multiplies by a mask, or fills by one, at a fraction of the speed.
    kept = rows.weights.numpy() * (rows.scaled >= cutoffs[:, None]).numpy()
    return draw(torch.from_numpy(kept), rows.uniforms)


def _cutoffs(rows: SampledRows, values: torch.Tensor, masses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds float32[n] and bool[n], whether they are final, from n rows of K candidates.

    values: float32[n, K], descending; masses: float64[n, K], their weights.
    """
    size = values.shape[1]
    top_ks, top_ps = torch.from_numpy(rows.filters.top_ks), torch.from_numpy(rows.filters.top_ps)
    k_on, p_on = top_ks > 0, top_ps < 1.0
    k_cut = _column(values, (top_ks - 1).clamp_min_(0)).masked_fill_(~k_on, -torch.inf)
    cdf = masses.cumsum(-1)
    k_total = _column(cdf, (values >= k_cut[:, None]).sum(-1) - 1)
    need = nucleus_mass(top_ps, torch.where(k_on, k_total, _row_totals(rows, p_on & ~k_on)))
    place = torch.searchsorted(cdf, need[:, None])[:, 0]
    p_cut = _column(values, place).masked_fill_(~p_on | (place == size), -torch.inf)
    cutoffs = torch.maximum(torch.maximum(k_cut, p_cut), rows.tops + torch.from_numpy(rows.filters.floors))
    if size == rows.scaled.shape[1]:
        return cutoffs, torch.ones_like(k_on)
    # Final in three cases: (1) everything at or above the cutoff is a candidate, and so is everything that top-p had to
    # count; (2) tokens that are no candidates weigh nothing; (3) the row is not finite, so its token means nothing.
    last = values[:, -1]
    done = (last < cutoffs) & (~k_on | ~p_on | (last < k_cut))
    return cutoffs, done | (last == -torch.inf) | ~rows.tops.isfinite()


def _column(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[n]: `table[i, places[i]]` of [n, K], places beyond either end meaning that end."""
    return table.gather(1, places.clamp(0, table.shape[1] - 1)[:, None])[:, 0]


def _row_totals(rows: SampledRows, wanted: torch.Tensor) -> torch.Tensor:
    """Exact float64[n] weight of whole rows where `wanted` (top-p without top-k), 0 elsewhere."""
    if bool(wanted.all()):
        return totals(rows.weights)
    sums = torch.zeros(len(wanted), dtype=torch.float64)
    if bool(wanted.any()):
        sums[wanted] = totals(rows.weights[wanted])
    return sums
