"""Lets unmodified recurrent layers run in a packed row: each mixer sees one request per batch entry, with its state.

All decode rows go through a mixer in one call [B, 1, C], every prefill segment in a call [1, t, C] of its own. The
states are gathered from the pool for the call and scattered back after it, because transformers changes them in place.
A slot of zeros means the same as no past, so a call always continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.models.hf.cache_argument import cache_argument


class StateView:
    """The cache that one mixer call gets: the states of its batch entries, with the methods of transformers (5.24)."""

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor | None) -> None:
        self.conv = conv
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """[n, channels, kernel]; callers write into it."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[n, ...]; callers write into it."""
        return self.recurrent

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Append `new` [n, channels, t]; returns the window before it and all of it."""
        full = torch.cat([self.conv, new.to(self.conv.dtype)], dim=-1)
        self.conv = full[..., -self.conv.shape[-1] :]
        return full

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Replace the temporal state."""
        assert self.recurrent is not None, "the probe saw no temporal state in this layer"
        self.recurrent = new.to(self.recurrent.dtype)
        return self.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Always: zeros are the state before the first token."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is rolled back."""
        return False


@dataclass(slots=True)
class StateContext:
    """The facts about the current step that the mixers of one model need. One per model, on one thread."""

    pool: HybridReqToTokenPool | None = None
    num_extend: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prefill segment."""
    prefixes: list[int] = field(default_factory=list)
    """Tokens before each prefill segment."""
    cuts: list[list[tuple[int, int]]] = field(default_factory=list)
    """By prefill segment, its snapshots: (after how many of its tokens, index of the tracked slot), ascending."""
    num_cuts: int = 0
    """Snapshots of all prefill segments; tracked slots from this index on belong to decode rows."""

    def begin(self, batch: ForwardBatch) -> None:
        """Start a step."""
        self.num_extend = batch.num_extend
        self.lengths = batch.extend_lens_host[: batch.num_extend].tolist()
        self.prefixes = batch.prefix_lens_host[: batch.num_extend].tolist()
        assert self.pool is not None, "bind() comes first"
        tracked = self.pool.tracked
        self.num_cuts = int((tracked.places < batch.num_extend).sum())
        self.cuts = [[] for _ in self.lengths]
        for number in range(self.num_cuts):
            self.cuts[tracked.places[number]].append((int(tracked.tokens[number]), number))


class PackedMixer:
    """Stands in for `forward` of one mixer. `stepwise`: its code drops the temporal state before several tokens at once
    (Mamba 1 in transformers), so a segment behind a prefix goes token by token.
    """

    def __init__(self, forward: Callable[..., Any], layer_id: int, stepwise: bool, context: StateContext) -> None:
        self._forward = forward
        self._layer_id = layer_id
        self._stepwise = stepwise
        self._context = context
        self._cache_argument = cache_argument(forward)

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        """[1, T, C] to [1, T, C]. Masks are ignored: a packed row has no padding, and each call gets only one request's
        segment or one token per row.
        """
        context = self._context
        assert context.pool is not None, "bind() comes first"
        pool = context.pool
        slots, outputs, start = pool.step_slots, [], 0
        for place, (length, prefix) in enumerate(zip(context.lengths, context.prefixes, strict=True)):
            segment = hidden_states[:, start : start + length]
            outputs += self._segment(segment, prefix, slots[place : place + 1], context.cuts[place])
            start += length
        if start < hidden_states.shape[1]:
            tails = hidden_states[0, start:, None]
            outputs.append(self._run(tails, slots[context.num_extend :]).transpose(0, 1))
            first = context.num_cuts
            if first < len(pool.tracked.places):
                pool.states.copy(self._layer_id, pool.tracked_from[first:], pool.tracked_slots[first:])
        return torch.cat(outputs, dim=1)

    def _segment(
        self, segment: torch.Tensor, prefix: int, slots: torch.Tensor, cuts: list[tuple[int, int]]
    ) -> list[torch.Tensor]:
        """Run `segment` [1, t, C], which follows `prefix` tokens; at each of `cuts` copy the state to its snapshot."""
        assert self._context.pool is not None
        outputs, start = [], 0
        for end, tracked in (*cuts, (segment.shape[1], None)):
            piece = segment[:, start:end]
            if piece.shape[1]:
                parts = piece.split(1, dim=1) if self._stepwise and prefix + start else (piece,)
                outputs += [self._run(part, slots) for part in parts]
            if tracked is not None:
                kept = self._context.pool.tracked_slots[tracked : tracked + 1]
                self._context.pool.states.copy(self._layer_id, slots, kept)
            start = end
        return outputs

    def _run(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """One call [n, t, C] on the states of `slots`, int64[n]."""
        assert self._context.pool is not None
        states = self._context.pool.states
        view = StateView(*states.gather(self._layer_id, slots))
        output: torch.Tensor = self._forward(hidden, **{self._cache_argument: view})
        states.scatter(self._layer_id, slots, view.conv, view.recurrent)
        return output
