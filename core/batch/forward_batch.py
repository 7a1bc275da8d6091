"""What model and attention backend see of one step: device tensors, and the host lengths that they were made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from core.batch.schedule_batch import ForwardMode
from core.batch.vision_batch import VisionBatch
from core.types.arrays import Floats, Ints

if TYPE_CHECKING:
    from core.memory.kv_pool import KVPool


@dataclass(slots=True)
class ForwardBatch:
    """B requests, T tokens packed into one row, S rows whose logits are wanted. Built and used on the forward stream.

    Device tensors are int64 unless said otherwise. A backend that runs under a captured graph may read only the device
    tensors; the CPU backend loops over the host lengths instead.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    """[T]: token ids, row after row in batch order."""
    positions: torch.Tensor
    """[T]: place of each token in its own sequence."""
    rows: torch.Tensor
    """[B]: request-pool rows; padded entries are 0."""
    seq_lens: torch.Tensor
    """[B]: lengths after this step; padded entries are 1."""
    out_cache_loc: torch.Tensor
    """[T]: KV slots to write."""
    last_indices: torch.Tensor
    """[S]: the places in T whose logits are wanted, in batch order."""
    req_to_token: torch.Tensor
    """int32[R, max_context_len]: KV slot of every token of every row."""
    kv_pool: KVPool
    num_extend: int
    """The first `num_extend` rows are prefill segments; the rest have exactly one token each."""
    prefix_lens_host: Ints
    """[B] on the host: tokens of each row whose KV is in the pools before this step."""
    extend_lens_host: Ints
    """[B] on the host: tokens of each row that this step computes."""
    verifies: bool = False
    """Whether the tokens of each row behind its first are drafts: what they leave in a row may not count."""
    grid_width: int = 0
    """Above 0 it is a grid: each of the B rows has so many places, and those that do not reach into `seq_lens` compute
    nothing that counts, and write to slot 0. The host does not know lengths then: `prefix_lens_host` is empty."""
    prefix_lens: torch.Tensor | None = None
    """[B]: tokens of each row before this step; None where the host knows them. With `starts` of the chunks alone."""
    starts: torch.Tensor | None = None
    """[num_extend + 1]: the place in T of the first token of each chunk, and behind them where the last one ends. Set
    where only the device knows how long chunks are: T counts places for them, and all behind that end is padding, as
    are chunks of no token. The host's lengths are empty then. None in any other step."""
    segments: tuple[torch.Tensor, torch.Tensor] | None = None
    """[num_extend] each: where in T each chunk begins, and how many tokens its row had before. The host knows both.
    None where they were not sent with the step: a backend that reads them uploads them."""
    wants_hidden: bool = False
    """Whether the model must set `hidden`: some row of this step is embedded, or a drafter reads it."""
    hidden: torch.Tensor | None = None
    """[T, H]: last hidden states after the final norm, in the model's dtype."""
    wants_layers: tuple[int, ...] = ()
    """Whose states the model must set in `layer_states`: see `HiddenRequest.layers`."""
    layer_states: torch.Tensor | None = None
    """[T, len(wants_layers) * H]: what each of `wants_layers` reads, side by side, in the model's dtype."""
    encoder_ids: torch.Tensor | None = None
    """[E]: inputs that the encoder reads before the decoder runs, one after another; never part of `input_ids`."""
    encoder_lens_host: Ints | None = None
    """[n] on the host: their lengths, which add up to E."""
    encoder_features: tuple[Floats, ...] = ()
    """On the host: what the encoder reads in place of `encoder_ids`, which then only count: [mels, frames] each."""
    vision: VisionBatch | None = None
    """On the host: images whose embeddings take the place of those of their tokens, and positions."""
    page_map: torch.Tensor | None = None
    """int32[pages + 1]: page named by `req_to_token` -> page of `kv_pool`; None where both are the same.
    `out_cache_loc` names slots of `kv_pool` in either case."""

    def pool_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Translate `slots`, as `req_to_token` names them, to slots of `kv_pool`; same shape and dtype."""
        if self.page_map is None:
            return slots
        size = self.kv_pool.page_size
        pages = self.page_map.index_select(0, (slots // size).view(-1)).view(slots.shape)
        return pages.to(slots.dtype) * size + slots % size
