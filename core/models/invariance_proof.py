"""Proves at start that a model gives a token the same bits whatever else is in its steps.

That its sums come in one order is by construction (decision 57), for kernels that were read one by one. This asks the
machine that will serve, and this very model: a compiler that contracts a sum otherwise for another number of rows, or a
kernel that no review has seen, would break a promise that no user can check. So a few sequences are computed alone,
then all in one step, then in pieces beside each other; every logit must have the same bits each time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.device.staging import Staging
from core.errors import ConfigError
from core.memory.kv_format import KVFormat
from core.memory.kv_pool import KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import Model, ModelSpec

logger = logging.getLogger(__name__)

LENGTHS: Final = (139, 70, 40, 19)
"""Tokens of the sequences: past two blocks of 64 keys, and together past the 256 rows of one go at a product."""
SIZES: Final = (1, 3, 17, 1, 6, 2, 33, 5, 1, 12)
"""Tokens of pieces, in turns: on both sides of each number of rows from which a product goes another way."""
PAGE_SIZE: Final = 16


class Piece(NamedTuple):
    """`extend` tokens of `row`, from 1 on, behind `prefix` of them."""

    row: int
    prefix: int
    extend: int


def prove_invariance(model: Model, attention: AttentionBackend, device: torch.device, format: KVFormat) -> None:
    """Compare the logits of sequences alone, together and in pieces, bit for bit. Leaves a small pool bound.

    Takes about 25 steps of up to 268 tokens. Raises ConfigError, in one line, where a bit differs.
    """
    spec = model.spec
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, spec.context_length) for length in LENGTHS]
    ids = [torch.randint(spec.vocab_size, (length,), generator=generator).to(device) for length in lengths]

    def run(course: Sequence[Sequence[Piece]]) -> Iterator[tuple[Sequence[Piece], torch.Tensor]]:
        return _run(model, attention, _Rows.of(spec, ids, format), course)

    whole = [Piece(row, 0, length) for row, length in enumerate(lengths, 1)]
    alone = [logits for piece in whole for _, logits in run([[piece]])]
    for what, course in (("beside others", [whole]), ("in pieces", list(_in_pieces(lengths)))):
        for pieces, logits in run(course):
            wanted = torch.cat([alone[row - 1][prefix : prefix + extend] for row, prefix, extend in pieces])
            # As bits: a NaN equals itself, and the two zeros differ.
            differ = int((logits.view(torch.int32) != wanted.view(torch.int32)).any(-1).sum())
            if differ:
                raise ConfigError(
                    f"deterministic is not possible: {spec.architecture} gives {differ} of {len(logits)} tokens other "
                    f"logits {what} than alone on this machine; serve it without --deterministic"
                )
    logger.info("proved deterministic: %d tokens have the same logits alone, together, in pieces", sum(lengths))


def _in_pieces(lengths: Sequence[int]) -> Iterator[list[Piece]]:
    """Steps in which each sequence goes on by another size. One of them sits out each step, while others are left."""
    done, step = [0] * len(lengths), 0
    while left := [place for place, length in enumerate(lengths) if done[place] < length]:
        pieces = []
        for place in left:
            if len(left) > 1 and place == left[step % len(left)]:
                continue
            size = min(SIZES[(step + 3 * place) % len(SIZES)], lengths[place] - done[place])
            pieces.append(Piece(place + 1, done[place], size))
            done[place] += size
        yield sorted(pieces, key=_decodes)
        step += 1


def _decodes(piece: Piece) -> bool:
    return piece.extend == 1 and piece.prefix > 0


def _run(
    model: Model, attention: AttentionBackend, rows: _Rows, course: Sequence[Sequence[Piece]]
) -> Iterator[tuple[Sequence[Piece], torch.Tensor]]:
    """The pieces of each step, decode rows last, and float32[T, vocab]: the logits of all their tokens."""
    model.bind(rows.pool, attention, {} if rows.states is None else {STATES: rows.states})
    for pieces in course:
        yield pieces, model.forward(rows.step(pieces)).clone()


@dataclass(frozen=True, slots=True)
class _Rows:
    """A row for each sequence, over small pools."""

    ids: Sequence[torch.Tensor]
    """By sequence, int64[length]; that of row i is at i - 1."""
    table: torch.Tensor
    """int32[rows + 1, length]: slots of each row, its pages anywhere; row 0 is padding."""
    pool: KVPool
    states: HybridReqToTokenPool | None

    @classmethod
    def of(cls, spec: ModelSpec, ids: Sequence[torch.Tensor], format: KVFormat) -> _Rows:
        """Pools on the device of `ids`, with nothing in them."""
        device, count = ids[0].device, len(ids)
        pages = -(-max(len(each) for each in ids) // PAGE_SIZE)
        pool = KVPool(spec.kv_layers, count * pages, PAGE_SIZE, spec.dtype, device, format=format)
        # Neighbours in a row are not neighbours in the pool.
        taken = 1 + torch.randperm(count * pages, generator=torch.Generator().manual_seed(1)).view(count, pages, 1)
        slots = (taken * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(count, -1)
        table = torch.cat([torch.zeros(1, slots.shape[1], dtype=slots.dtype), slots]).to(torch.int32).to(device)
        states = None
        if spec.state_layers:
            states = HybridReqToTokenPool(
                ReqToTokenPool(count, table.shape[1], device), MambaPool(spec.state_layers, count, device)
            )
        return cls(ids, table, pool, states)

    def step(self, pieces: Sequence[Piece]) -> ForwardBatch:
        """A step that wants the logits of all its tokens; states of rows that begin are zeros."""
        device, count = self.table.device, sum(not _decodes(piece) for piece in pieces)
        prefix, extend = (np.array([piece[at] for piece in pieces], np.int64) for at in (1, 2))
        rows = torch.tensor([piece.row for piece in pieces], device=device)
        if self.states is not None:
            fresh = np.array([piece.row for piece in pieces if piece.prefix == 0], np.int64)
            self.states.begin(rows, StateWrites(fresh, fresh, np.zeros_like(fresh)), Staging(device))
        spans = [(row, slice(start, start + size)) for row, start, size in pieces]
        return ForwardBatch(
            mode=ForwardMode.of(count, len(pieces) - count),
            input_ids=torch.cat([self.ids[row - 1][span] for row, span in spans]),
            positions=torch.cat([torch.arange(span.start, span.stop, device=device) for _, span in spans]),
            rows=rows,
            seq_lens=torch.from_numpy(prefix + extend).to(device),
            out_cache_loc=torch.cat([self.table[row, span] for row, span in spans]).to(torch.int64),
            last_indices=torch.arange(int(extend.sum()), device=device),
            req_to_token=self.table,
            kv_pool=self.pool,
            num_extend=count,
            prefix_lens_host=prefix,
            extend_lens_host=extend,
        )
