"""Which tokens top-k, top-p and min-p keep, as one threshold per row: {token: scaled logit >= cutoff}.

A threshold on the value keeps all ties or none, so the kept set does not depend on the order in which a sort or a top-k
kernel happens to list equal logits. There are two ways to find it, exactly equal in result: among the largest logits,
with a sort for the rows where those do not suffice (`candidates`, for the CPU); and here by bisection over the bits of
the value, in a fixed number of passes, without sorting and without a look at the values on the host (for accelerators).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from core.sampling.draw import totals
from core.types.arrays import Ints

_LOWEST_KEY = -(2**31)


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of n rows on the host. Off is `top_ks == 0`, `top_ps == 1`, `floors == -inf`."""

    top_ks: Ints
    top_ps: npt.NDArray[np.float64]
    floors: npt.NDArray[np.float32]
    """log(min_p): a token stays when its scaled logit is at least the row's largest plus this."""

    @classmethod
    def of(cls, top_ks: Ints, top_ps: npt.NDArray[np.float32], min_ps: npt.NDArray[np.float32], vocab: int) -> Filters:
        """From the arrays of a SamplingBatch; a `top_k` of the whole vocabulary is the same as none."""
        with np.errstate(divide="ignore"):
            floors = np.log(min_ps.astype(np.float64)).astype(np.float32)
        return cls(np.where(top_ks >= vocab, 0, top_ks), top_ps.astype(np.float64), floors)

    @property
    def active(self) -> npt.NDArray[np.bool_]:
        """bool[n]: rows with any filter on."""
        return (self.top_ks > 0) | (self.top_ps < 1.0) | (self.floors > -np.inf)

    def take(self, places: Ints) -> Filters:
        """The filters of some rows."""
        return Filters(self.top_ks[places], self.top_ps[places], self.floors[places])


@dataclass(frozen=True, slots=True)
class SampledRows:
    """n rows that sample at random: tensors on the device, filters on the host."""

    scaled: torch.Tensor
    """float32[n, W]: logits over temperature, padded with -inf to whole blocks (`draw.padded`)."""
    weights: torch.Tensor
    """float32[n, W]: from `draw.weigh`."""
    tops: torch.Tensor
    """float32[n]: row maxima of `scaled`."""
    uniforms: torch.Tensor
    """float64[n]."""
    filters: Filters

    def take(self, places: Ints, index: torch.Tensor | None = None) -> SampledRows:
        """Rows `places`, int64[m]; `self` if those are all. `index`: `places` on the device, unless that is the CPU."""
        if len(places) == len(self.scaled):
            return self
        if index is None:
            index = torch.from_numpy(places)
        return SampledRows(
            self.scaled.index_select(0, index),
            self.weights.index_select(0, index),
            self.tops.index_select(0, index),
            self.uniforms.index_select(0, index),
            self.filters.take(places),
        )


@dataclass(frozen=True, slots=True)
class DeviceFilters:
    """`Filters` on the device: int64[n], float64[n], float32[n]."""

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    floors: torch.Tensor


def nucleus_mass(top_ps: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """float64[n]: the weight that a nucleus must reach, out of `total`; both ways to a cutoff must use this one."""
    return (top_ps * total).ceil_()


def dropped(scaled: torch.Tensor, weights: torch.Tensor, tops: torch.Tensor, filters: DeviceFilters) -> torch.Tensor:
    """bool[n, W]: the tokens that the filters drop, found by bisection in at most 64 passes over the rows.

    scaled, weights: float32[n, W]; tops: float32[n], maxima of `scaled`. Top-p counts what top-k left as the whole.
    """
    keys = ordered_keys(scaled)
    floor_keys = ordered_keys(tops + filters.floors).long()
    # With top-k off one token is asked for, which is harmless, and the answer is replaced by the lowest key.
    k_off = filters.top_ks == 0
    k_keys = _largest_key(keys, None, filters.top_ks.clamp_min(1).double()).masked_fill_(k_off, _LOWEST_KEY)
    rest = weights.masked_fill(keys < k_keys[:, None], 0.0)
    p_keys = _largest_key(keys, rest, nucleus_mass(filters.top_ps, totals(rest)))
    p_keys = p_keys.masked_fill_(filters.top_ps >= 1.0, _LOWEST_KEY)
    return keys < torch.maximum(torch.maximum(k_keys, p_keys), floor_keys)[:, None]


def ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """int32 of the same shape, ordered like the float32 values; +0 and -0 share a key."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def keyed_values(keys: torch.Tensor) -> torch.Tensor:
    """The float32 values of `ordered_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _largest_key(keys: torch.Tensor, weights: torch.Tensor | None, least: torch.Tensor) -> torch.Tensor:
    """int64[n]: the largest key t with weight{key >= t} >= least, the lowest key when even everything weighs less.

    `weights=None` counts tokens. Sums are exact, so the answer is a key that occurs in the row.
    """
    low = torch.full((len(keys),), _LOWEST_KEY, dtype=torch.int64, device=keys.device)
    high = torch.full_like(low, 2**31)
    for _ in range(32):
        middle = (low + high) >> 1
        inside = keys >= middle[:, None]
        mass = inside.sum(-1).double() if weights is None else totals(weights.masked_fill(~inside, 0.0))
        enough = mass >= least
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return low
