"""Steps with prompt chunks as captured graphs: one for each number of chunk tokens and of decode rows beside them.

They are to a mixed step what `decode_graphs` are to a decode step, attention included: where segments begin and end is
read on the device alone (`ForwardBatch.starts`), so a graph holds one long chunk as well as many short ones. Without
them a chunk sends the decode rows of its step back to dozens of launches a layer. vLLM captures such steps piecewise,
with attention outside; nothing has to be outside where attention launches by sizes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from core.attention.base import MOST_CHUNKS, AttentionBackend
from core.batch.build import chunk_places
from core.batch.forward_batch import ForwardBatch
from core.batch.ragged import starts_of
from core.batch.schedule_batch import ForwardMode, ScheduleBatch
from core.device.graphs import Graph
from core.device.static_block import StaticBlock
from core.executor.capture import NO_LENGTHS, CaptureProgress, captured, padded, record
from core.executor.decode_graphs import CARRIED, LISTED, DecodeGraphs, DecodeInputs
from core.executor.device_state import DeviceState
from core.executor.grid_speculator import GridSpeculator
from core.executor.verification import Verification
from core.models.base import ModelSpec, hooks_layers
from core.relay.resolve import DecodeRows, clear, staged_ids
from core.types.arrays import Ints

logger = logging.getLogger(__name__)

TOKENS: Final = (64, 128, 256, 384, 512, 768, 1024)
"""Places for chunk tokens. Up to 256 of them padding is nearly free: a step's time is that of reading the weights.
Beyond, at most a third of a step is padding. More tokens than the last compute for longer than their launches take, so
the device never waits for these, and a graph would only add the padding."""

ROWS: Final = (8, 32, 128, 256)
"""Decode rows beside them. Few, so that a start captures two or three dozen graphs; a padded row costs one token."""

TOKENS_OF_A_SEGMENT, LEAST_SEGMENTS = 16, 4
"""A graph holds a segment for so many of its tokens, and up to MOST_CHUNKS. Each takes a tile of attention that ends at
once where it is not needed."""


class MixedSize(NamedTuple):
    """What a graph has places for, padding included."""

    tokens: int
    """Of prompt chunks."""
    rows: int
    """Decode rows: at least one, so a step of chunks alone is padded with row 0."""

    @property
    def segments(self) -> int:
        """Prompt chunks."""
        return min(max(LEAST_SEGMENTS, self.tokens // TOKENS_OF_A_SEGMENT), MOST_CHUNKS)


def chunk_tokens(most: int) -> tuple[int, ...]:
    """Places for chunk tokens to capture, ascending, where a step has at most `most`."""
    return _up_to(TOKENS, most)


def mixed_sizes(tokens: Sequence[int], most_rows: int) -> tuple[MixedSize, ...]:
    """What to capture for `tokens`, as `chunk_tokens` made them, and up to `most_rows` rows in a batch; ascending."""
    return tuple(MixedSize(count, rows) for count in tokens for rows in _up_to(ROWS, most_rows))


def why_not_mixed(spec: ModelSpec, attention: AttentionBackend | None) -> str | None:
    """Why steps with chunks cannot be captured where decode steps are, as the end of a sentence; None if they can."""
    if attention is None or not attention.mixed_safe:
        return "the attention backend plans chunks on the host"
    if spec.state_layers:
        return "recurrent layers are grouped on the host"
    return "cross-attention is planned on the host" if spec.encoder else None


@dataclass(frozen=True, slots=True)
class Sections:
    """Inputs in static memory, int64 each, in the order in which they lie there. Padding is 0 except in `starts`.

    T tokens, S segments, R decode rows: those of the `MixedSize`; L: places for logits.
    """

    rows: torch.Tensor
    """[S] of segments, then [R] of decode rows."""
    lower: torch.Tensor
    """[R]: the least length of each decode row before the step."""
    upper: torch.Tensor
    """[R]: the most."""
    ids: torch.Tensor
    """[T]: prompt ids."""
    token_rows: torch.Tensor
    """[T]: the row of each."""
    positions: torch.Tensor
    """[T]: its position there."""
    prefixes: torch.Tensor
    """[S]: lengths of the segments' rows before the step."""
    ends: torch.Tensor
    """[S]: and after it."""
    starts: torch.Tensor
    """[S + 1]: see `ForwardBatch`."""
    last: torch.Tensor
    """[L]: places in T + R whose logits are wanted."""
    order: torch.Tensor
    """[S + R]: where each row of the batch stands among the padded ones."""
    sampling: torch.Tensor
    """[L]: which rows of the batch sample."""

    @staticmethod
    def lengths(size: MixedSize, places: int) -> list[int]:
        """Of all of them, with `places` for logits."""
        tokens, segments, rows = size.tokens, size.segments, size.rows
        both = segments + rows
        return [both, rows, rows, tokens, tokens, tokens, segments, segments, segments + 1, places, both, places]

    @classmethod
    def of(cls, memory: torch.Tensor, size: MixedSize, places: int) -> Sections:
        """Views of the beginning of `memory`, int64[n]."""
        lengths = cls.lengths(size, places)
        return cls(*memory[: sum(lengths)].split(lengths))


class MixedGraphs:
    """Graphs by size over the device state of one engine, beside those of decode steps. Forward stream only.

    They share the memory of those, and the place where these leave logits. What a replay reads and leaves is as in
    `DecodeGraphs`; prompt ids, and where chunks stand, come with the step's other inputs in one transfer.
    """

    def __init__(self, state: DeviceState, sizes: Sequence[MixedSize], decodes: DecodeGraphs) -> None:
        """`sizes`: as `mixed_sizes` made them."""
        assert sizes, "there is something to capture"
        self._state = state
        self._sizes = tuple(sorted(sizes))
        self._maker, self._logits = decodes.maker, decodes.logits
        pool, page, device = state.pool, state.kv_pool.page_size, state.streams.device
        rows = max(size.segments + size.rows for size in self._sizes)
        inputs = max(sum(self._lengths(size)) for size in self._sizes)
        # Room for the inputs, and beside them for every row fresh and one that samples, and for table writes: new pages
        # for all that is computed, and one prompt that finds all of its length in the prefix cache.
        pages = (self._sizes[-1].tokens + pool.max_context_len) // page + rows
        self.block = StaticBlock(inputs + (3 + CARRIED) * rows + 3 * pages + LISTED, state.staging)
        self.seq_lens, self.sample_lens = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._graphs: dict[MixedSize, Graph] = {}
        self.replays = 0
        """Number of steps replayed so far."""

    @torch.inference_mode()
    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Record all sizes, as `DecodeGraphs.capture` does."""
        sizes = sorted(self._sizes, key=sum, reverse=True)
        self._graphs = record(self._state, self._maker, sizes, self._work, progress)

    def takes(self, batch: ScheduleBatch) -> bool:
        """Whether `batch` can be replayed: chunks, and decode rows beside them or none.

        No embeddings, whose hidden states leave the model, no inputs of an encoder, no layer hooks.
        """
        plain = batch.pooling is None and not len(batch.encoder_lens) and not hooks_layers(batch.companion_writes)
        size = self._size(batch) if plain and batch.num_extend else None
        if size is None:
            return False
        beside = (batch.rows, batch.sample_indices, batch.fresh_rows, *3 * (batch.table_writes.rows,))
        return sum(self._lengths(size)) + sum(map(len, beside)) <= self.block.memory.numel()

    def load(self, batch: ScheduleBatch, carried: Sequence[np.ndarray] = ()) -> DecodeInputs:
        """Copy the inputs of `batch`, which `takes` accepted, to the device in one transfer, with fresh padding.

        Raises InvariantViolation when the staged prompt ids are not as many as planned.
        """
        size, writes = self._size(batch), batch.table_writes
        assert size is not None, "it was asked for first"
        sections = self._padded(_arrays(batch, size), size)
        beside = (batch.rows, batch.sample_rows, batch.fresh_rows, writes.rows, writes.places, writes.pages)
        views, parcel = self.block.carry([*sections, *beside], carried)
        rows, sample_rows, fresh, *table = views[len(sections) :]
        clear(batch.staging)
        lens, sample_lens = self.seq_lens[: len(rows)], self.sample_lens[: len(sample_rows)]
        writes_on_device = (table[0], table[1], table[2])
        sampled = sample_rows, sample_lens
        return DecodeInputs(
            size.rows, rows, lens, fresh, writes_on_device, chunks=size.tokens, sampled=sampled, staging=parcel
        )

    def replay(self, inputs: DecodeInputs) -> torch.Tensor:
        """float32[S, V]: logits of the rows that sample, a view that the next replay overwrites; see `DecodeGraphs`."""
        assert inputs.sampled is not None, "it was loaded here"
        self._graphs[MixedSize(inputs.chunks, inputs.size)].replay()
        self.replays += 1
        return self._logits[: len(inputs.sampled[0])]

    def _size(self, batch: ScheduleBatch) -> MixedSize | None:
        """The least one with places for all of `batch`, tokens first; None where there is none."""
        chunks = batch.num_extend
        tokens, rows = int(batch.extend_lens[:chunks].sum()), batch.num_decode
        fits = (size for size in self._sizes if size.tokens >= tokens and size.segments >= chunks and size.rows >= rows)
        return next(fits, None)

    def _places(self, size: MixedSize) -> int:
        """How many rows may sample: no more than a batch has."""
        return min(size.segments + size.rows, len(self._logits))

    def _lengths(self, size: MixedSize) -> list[int]:
        return Sections.lengths(size, self._places(size))

    def _padded(self, arrays: Sequence[Ints], size: MixedSize) -> list[Ints]:
        pairs = zip(arrays, self._lengths(size), strict=True)
        return [part for array, length in pairs for part in padded(array, length)]

    def _work(self, size: MixedSize) -> Callable[[], None]:
        self.block.fill(self._padded([NO_LENGTHS] * len(self._lengths(size)), size))
        state, places, both = self._state, self._places(size), size.segments + size.rows
        inputs = Sections.of(self.block.memory, size, places)
        decode = DecodeRows(inputs.rows[size.segments :], inputs.lower, inputs.upper)
        logits, seq_lens, sample_lens = self._logits[:places], self.seq_lens[:both], self.sample_lens[:places]

        def work() -> None:
            entered = decode.enter(state.future_map)
            rows, positions, lens = decode.behind((inputs.token_rows, inputs.positions, inputs.ends), entered)
            batch = ForwardBatch(
                mode=ForwardMode.MIXED,
                input_ids=torch.cat([inputs.ids, entered.ids]),
                positions=positions,
                rows=inputs.rows,
                seq_lens=lens,
                out_cache_loc=state.pool.slots(rows, positions),
                last_indices=inputs.last,
                req_to_token=state.pool.table,
                kv_pool=state.kv_pool,
                num_extend=size.segments,
                prefix_lens_host=NO_LENGTHS,
                extend_lens_host=NO_LENGTHS,
                prefix_lens=inputs.prefixes,
                starts=inputs.starts,
            )
            torch.index_select(lens, 0, inputs.order, out=seq_lens)
            torch.index_select(seq_lens, 0, inputs.sampling, out=sample_lens)
            logits.copy_(state.model.forward(batch))

        return work


def capture_mixed_graphs(
    state: DeviceState, decodes: DecodeGraphs | None, speculator: Verification | None
) -> MixedGraphs | None:
    """Graphs of steps with chunks beside `decodes`; None where these are none, or for a reason that the log says."""
    if decodes is None or not state.graph_tokens:
        return None
    reason = why_not_mixed(state.model.spec, state.attention)
    if speculator is not None and not isinstance(speculator, GridSpeculator):
        reason = "drafts are made of what the model ran over"
    if reason is not None:
        logger.info("steps with prompts are not captured: %s", reason)
        return None
    sizes = mixed_sizes(state.graph_tokens, state.graph_sizes[-1])
    graphs = MixedGraphs(state, sizes, decodes)
    which = f"{len(sizes)} sizes of steps with up to {sizes[-1].tokens} prompt tokens"
    return graphs if captured("steps with prompts", which, graphs.capture) else None


def _arrays(batch: ScheduleBatch, size: MixedSize) -> list[Ints]:
    """What goes into `Sections`, in their order, without padding but of rows in their midst."""
    chunks, decodes = batch.num_extend, np.arange(batch.num_decode)
    extend = batch.extend_lens[:chunks]
    token_rows, positions, ends = chunk_places(batch)
    rows = padded(batch.rows[:chunks], size.segments)
    starts = np.concatenate([starts_of(extend), padded(ends[:0], size.segments + 1 - chunks, len(token_rows))[1]])
    return [
        np.concatenate([*rows, batch.rows[chunks:]]),
        batch.lower_lens,
        batch.prefix_lens[chunks:],
        staged_ids(batch.staging, len(token_rows)),
        token_rows,
        positions,
        batch.prefix_lens[:chunks],
        ends,
        starts,
        np.concatenate([np.cumsum(extend) - 1, size.tokens + decodes])[batch.sample_indices],
        np.concatenate([np.arange(chunks), size.segments + decodes]),
        batch.sample_indices,
    ]


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Those of `sizes` below `most`, and behind them `most` or the largest of them."""
    top = min(most, sizes[-1])
    return (*(size for size in sizes if size < top), top)
