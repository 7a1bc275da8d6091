"""Lets unmodified recurrent layers run in a packed row: each mixer sees one request per batch entry, with its state.

All decode rows go through a mixer in one call [B, 1, C], every prefill segment in a call [1, t, C] of its own. The
states are gathered from the pool for the call and scattered back after it, because transformers changes them in place.
A slot of zeros means the same as no past, so a call always continues. Drafts go through it as decode rows do: the
newest tokens of all rows in one call, then the first drafts of those that have any, and so on, each call from the
states of the one before. So each draft leaves its state; the large matrices are read once for all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.device.staging import Staging
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.models.hf.cache_argument import cache_argument
from core.models.hf.projections import Projections
from core.types.arrays import Ints

NO_PROJECTIONS: Final = Projections()


class StateView:
    """The cache that one mixer call gets: the states of its batch entries, with the methods of transformers (5.24)."""

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor | None) -> None:
        self.conv = conv
        self.recurrent = recurrent

    @property
    def layers(self) -> EveryLayer:
        """Up to transformers 5.20 mixers have no `get_conv_state`, and take their states from here."""
        return EveryLayer(self)

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


@dataclass(frozen=True, slots=True)
class EveryLayer:
    """The layers of a `StateView`: each index is the one layer that the call is for."""

    view: StateView

    def __getitem__(self, layer_idx: int) -> EveryLayer:
        return self

    @property
    def conv_states(self) -> tuple[torch.Tensor]:
        """By index of the state; callers write into them."""
        return (self.view.conv,)

    @property
    def recurrent_states(self) -> tuple[torch.Tensor | None]:
        """By index of the state; callers write into them."""
        return (self.view.recurrent,)

    @property
    def record_past(self) -> bool:
        """As `is_recording_past` says it."""
        return self.view.is_recording_past(0)


@dataclass(frozen=True, slots=True)
class TrialCalls:
    """The calls of a step that verifies drafts, one after the other; T tokens in all."""

    order: torch.Tensor
    """int64[T]: the tokens of the packed row, call after call."""
    back: torch.Tensor
    """int64[T]: where in this order each token of the packed row is."""
    sources: tuple[torch.Tensor, ...]
    """By call, int64[n]: the slots with the states that its tokens go on from."""
    slots: tuple[torch.Tensor, ...]
    """By call, int64[n]: those for the states behind its tokens."""

    @classmethod
    def of(cls, counts: Ints, pool: HybridReqToTokenPool, staging: Staging, one_by_one: bool) -> TrialCalls:
        """For `counts[i]` tokens of row i, int64[B]. `one_by_one`: a call for each token, in the order of the row."""
        states = pool.verify(counts, staging)
        row = np.repeat(np.arange(len(counts)), counts)
        behind = np.arange(len(row)) - states.starts[row]
        call = np.arange(len(row)) if one_by_one else behind
        order = np.argsort(call, kind="stable")
        # The newest token of a row goes on from the row's own slot, which is the one that it writes.
        before = np.arange(len(row)) - (behind > 0)
        sizes = np.bincount(call).tolist()
        ordered, back, previous = staging.upload([order, np.argsort(order), before[order]])
        return cls(ordered, back, states.slots[previous].split(sizes), states.slots[ordered].split(sizes))


@dataclass(slots=True)
class StateContext:
    """The facts about the current step that the mixers of one model need. One per model, on one thread."""

    pool: HybridReqToTokenPool | None = None
    in_order: bool = False
    """Whether layers inside a mixer must see tokens in the order of the packed row: adapters count them."""
    trial: TrialCalls | None = None
    """None in a step that verifies no drafts."""
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
        if batch.verifies:
            staging = Staging(batch.rows.device)
            self.trial = TrialCalls.of(batch.extend_lens_host, self.pool, staging, self.in_order)
            return
        self.trial, tracked = None, self.pool.tracked
        self.num_cuts = int((tracked.places < batch.num_extend).sum())
        self.cuts = [[] for _ in self.lengths]
        for number in range(self.num_cuts):
            place = int(tracked.places[number])
            self.cuts[place].append((int(tracked.ends[number]) - self.prefixes[place], number))


class PackedMixer:
    """Stands in for `forward` of one mixer. `stepwise`: its code drops the temporal state before several tokens at once
    (Mamba 1 in transformers), so a segment behind a prefix goes token by token.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        layer_id: int,
        stepwise: bool,
        context: StateContext,
        projections: Projections = NO_PROJECTIONS,
    ) -> None:
        self._forward = forward
        self._projections = projections
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
        if context.trial is not None:
            return self._verify(hidden_states, context.trial)
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

    def _verify(self, hidden_states: torch.Tensor, trial: TrialCalls) -> torch.Tensor:
        """Run the newest token and the drafts of each row, [1, T, C], and keep the state behind each of them."""
        tokens, sizes = hidden_states[0].index_select(0, trial.order)[:, None], [len(slots) for slots in trial.slots]
        # Hooks of adapters add to what a layer makes of its input, so there each layer must run in each call.
        projections = NO_PROJECTIONS if self._context.in_order else self._projections
        with projections.shared(tokens, sizes) as leave:
            calls = zip(tokens.split(sizes), trial.slots, trial.sources, strict=True)
            outputs = torch.cat([self._run(hidden, slots, sources) for hidden, slots, sources in calls])
        return leave(outputs).index_select(0, trial.back).transpose(0, 1)

    def _run(self, hidden: torch.Tensor, slots: torch.Tensor, sources: torch.Tensor | None = None) -> torch.Tensor:
        """One call [n, t, C] that goes on from the states of `sources`, or of `slots`, and writes `slots`, int64[n]."""
        assert self._context.pool is not None
        states = self._context.pool.states
        view = StateView(*states.gather(self._layer_id, slots if sources is None else sources))
        output: torch.Tensor = self._forward(hidden, **{self._cache_argument: view})
        states.scatter(self._layer_id, slots, view.conv, view.recurrent)
        return output
