"""Recurrent states on the device: per layer a convolution window and a temporal state for every slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state tensor of one request: its shape without the batch, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """What one recurrent layer keeps per request. `recurrent` is None for a convolution alone (LFM2)."""

    layer_id: int
    conv: StateShape
    """[channels, kernel]: the newest inputs of the convolution."""
    recurrent: StateShape | None

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of this layer."""
        return self.conv.nbytes + (self.recurrent.nbytes if self.recurrent else 0)


class MambaPool:
    """`size` slots plus padding slot 0, and `drafts` slots behind them, per layer [1 + size + drafts, ...].

    Forward stream only. From SGLang's MambaPool. A slot of zeros is the state before the first token, for convolution
    and recurrence alike, so a cleared slot needs no flag "has no past". The slots behind `size` hold what a step that
    verifies drafts makes of them, until it is known which are right; between two steps they mean nothing.
    """

    def __init__(self, layers: Sequence[StateLayerSpec], size: int, device: torch.device, drafts: int = 0) -> None:
        assert layers, "a pool needs at least one layer"
        assert size >= 1 and drafts >= 0, (size, drafts)
        self.layers = tuple(layers)
        self.size = size
        self.drafts = drafts
        self.device = device
        self._conv = {spec.layer_id: self._slots(spec.conv) for spec in layers}
        self._recurrent = {s.layer_id: self._slots(s.recurrent) for s in layers if s.recurrent is not None}

    @staticmethod
    def bytes_per_slot(layers: Iterable[StateLayerSpec]) -> int:
        """Bytes that one slot takes in all layers together."""
        return sum(spec.nbytes for spec in layers)

    def conv(self, layer_id: int) -> torch.Tensor:
        """The convolution windows of layer `layer_id`, [1 + size + drafts, channels, kernel]."""
        return self._conv[layer_id]

    def recurrent(self, layer_id: int) -> torch.Tensor | None:
        """The temporal states of layer `layer_id`, [1 + size + drafts, ...]; None if it has none."""
        return self._recurrent.get(layer_id)

    @property
    def storage(self) -> list[torch.Tensor]:
        """All that it holds of memory, layer after layer."""
        return [*self._conv.values(), *self._recurrent.values()]

    def start(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Make `slots` copies of `sources`, int64[n] each, or zeros where the source is 0, in every layer.

        All sources are read first, so a slot may be the source of another, or of itself.
        """
        for states in (*self._conv.values(), *self._recurrent.values()):
            begun = states[sources]
            # Slot 0 cannot be copied as "zeros": padded rows write there.
            begun.masked_fill_((sources == 0).view(-1, *[1] * (begun.dim() - 1)), 0)
            states.index_copy_(0, slots, begun)

    def copy(self, layer_id: int, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Make `slots` copies of `sources`, int64[n] each, in layer `layer_id`. All sources are read first."""
        self.scatter(layer_id, slots, *self.gather(layer_id, sources))

    def copy_all(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Make `slots` copies of `sources`, int64[n] each, in every layer. All sources are read first."""
        for states in (*self._conv.values(), *self._recurrent.values()):
            states.index_copy_(0, slots, states[sources])

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies [n, ...] of the convolution window and, if any, the temporal state of `slots`, int64[n]."""
        recurrent = self._recurrent.get(layer_id)
        return self._conv[layer_id][slots], None if recurrent is None else recurrent[slots]

    def scatter(self, layer_id: int, slots: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor | None) -> None:
        """Write states back to `slots`, int64[n]; they may repeat only in padding slot 0."""
        self._conv[layer_id].index_copy_(0, slots, conv)
        if recurrent is not None:
            self._recurrent[layer_id].index_copy_(0, slots, recurrent)

    def _slots(self, state: StateShape) -> torch.Tensor:
        return torch.zeros(1 + self.size + self.drafts, *state.shape, dtype=state.dtype, device=self.device)
