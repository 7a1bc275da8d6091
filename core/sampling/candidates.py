"""Filtered sampling on the CPU: look at the K largest logits only, and at more for the rows whose kept set is larger.

Most nuclei hold a few dozen tokens. Rows whose kept set provably lies within the first K candidates are drawn from
those; the rest go on to the next K. Flat distributions (random weights have nuclei of a thousand tokens and more) end
with a sort of just those rows. Whether a row is done is read on the host: free on the CPU, a stall elsewhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from core.sampling.cutoff import SampledRows, nucleus_mass
from core.sampling.draw import draw, draw_among, totals

LEVELS: Final = (64, 1024, 8192)
"""K of each round; the round after the last sorts whole rows."""
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
    """Token ids int64[n]; what they mean for rows whose top is not finite is undefined."""
    width = rows.scaled.shape[1]
    tokens = torch.zeros(len(rows.scaled), dtype=torch.int64)
    # One candidate more than top-k asks for: whether the k-th has ties can only be seen from the next value.
    least = rows.filters.top_ks + 1
    pending = np.arange(len(rows.scaled))
    for size in (*(level for level in LEVELS if level < width), width):
        now = pending[least[pending] <= size]
        if len(now) == 0:
            continue
        drawn, done = _draw_round(rows.take(now), size)
        tokens[torch.from_numpy(now[done])] = drawn[torch.from_numpy(done)]
        pending = np.setdiff1d(pending, now[done], assume_unique=True)
    assert len(pending) == 0, pending
    return tokens


def largest(scaled: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values float32[n, size] in descending order and ids int64[n, size] of the `size` largest entries per row.

    Which of several equal entries are listed at the end is left open. With few wanted among many, only the `size`
    groups with the largest maxima are searched: an entry outside them has `size` entries above or equal to it.
    """
    n, width = scaled.shape
    if size * GROUP * 4 > width or width % GROUP:
        return scaled.topk(size)
    groups = scaled.view(n, -1, GROUP)
    best = groups.amax(-1).topk(size, sorted=False).indices
    values, places = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP)).view(n, -1).topk(size)
    return values, best.gather(1, places // GROUP) * GROUP + places % GROUP


def _draw_unfiltered(rows: SampledRows) -> torch.Tensor:
    return draw(rows.weights, rows.uniforms)


def _draw_round(rows: SampledRows, size: int) -> tuple[torch.Tensor, np.ndarray]:
    """Tokens int64[n] drawn from `size` candidates, and bool[n]: which rows' kept tokens were all among them."""
    values, ids = largest(rows.scaled, size)
    masses = rows.weights.gather(1, ids).double()
    cutoffs, done = _cutoffs(rows, values, masses)
    masses.masked_fill_(values < cutoffs[:, None], 0.0)
    return draw_among(ids, masses, rows.uniforms), done.numpy()


def _cutoffs(rows: SampledRows, values: torch.Tensor, masses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds float32[n] and bool[n], whether they are final, from n rows of K candidates.

    values: float32[n, K], descending; masses: float64[n, K], their weights.
    """
    size = values.shape[1]
    top_ks, top_ps = torch.from_numpy(rows.filters.top_ks), torch.from_numpy(rows.filters.top_ps)
    k_on, p_on = top_ks > 0, top_ps < 1.0
    k_cut = values.gather(1, (top_ks - 1).clamp_(0, size - 1)[:, None])[:, 0].masked_fill_(~k_on, -torch.inf)
    cdf = masses.masked_fill(values < k_cut[:, None], 0.0).cumsum(-1)
    total = torch.where(k_on, cdf[:, -1], _row_totals(rows, p_on & ~k_on))
    place = (cdf < nucleus_mass(top_ps, total)[:, None]).sum(-1)
    p_cut = values.gather(1, place.clamp_max(size - 1)[:, None])[:, 0]
    p_cut = p_cut.masked_fill_(~p_on | (place == size), -torch.inf)
    cutoffs = torch.maximum(torch.maximum(k_cut, p_cut), rows.tops + torch.from_numpy(rows.filters.floors))
    last = values[:, -1]
    # Everything at or above the cutoff is a candidate, and so is everything top-p had to count; or what is no candidate
    # weighs nothing; or the row is lost anyway.
    done = (last < cutoffs) & (~k_on | ~p_on | (last < k_cut))
    done |= (last == -torch.inf) | ~rows.tops.isfinite()
    return cutoffs, done if size < rows.scaled.shape[1] else torch.ones_like(done)


def _row_totals(rows: SampledRows, wanted: torch.Tensor) -> torch.Tensor:
    """Exact float64[n] weight of whole rows where `wanted` (top-p without top-k), 0 elsewhere."""
    if bool(wanted.all()):
        return totals(rows.weights)
    sums = torch.zeros(len(wanted), dtype=torch.float64)
    if bool(wanted.any()):
        sums[wanted] = totals(rows.weights[wanted])
    return sums
