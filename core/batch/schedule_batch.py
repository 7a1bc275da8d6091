"""One planned step: an immutable snapshot that the scheduler submits and the forward thread executes.

Rows come in a fixed order: prefill segments first, then decode rows ("tails"). All arrays are host memory, pinned when
the device can copy from it asynchronously. The scheduler keeps no reference that it would mutate later (law 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from core.batch.grammar_batch import GrammarSeed
from core.batch.pooling_batch import PoolingBatch
from core.batch.sampling_batch import SamplingBatch
from core.batch.scoring_batch import ScoringBatch
from core.batch.spec_plan import SpecPlan
from core.batch.vision_batch import VisionBatch
from core.memory.companion import Writes
from core.memory.host_moves import CopyBack
from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Floats, Ints


class ForwardMode(Enum):
    """EXTEND: prompt chunks. DECODE: one token per request. MIXED: chunks, then decode tails."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"

    @classmethod
    def of(cls, num_extend: int, num_decode: int) -> ForwardMode:
        """The mode of a step with so many prefill segments and so many decode rows."""
        if num_extend and num_decode:
            return cls.MIXED
        return cls.EXTEND if num_extend else cls.DECODE


@dataclass(slots=True)
class InputStaging:
    """Prompt ids on their way to the device; the only part of a batch that the forward thread consumes (law 7).

    `prefill_ids_cpu`: int64[Tp], pinned where possible, the chunks of all prefill segments in batch order, or None when
    the step has none. `mix_decode_rows`: rows whose newest token must be gathered and appended, or None.
    `encoder_ids_cpu`: int64[E], pinned where possible, the encoder inputs of requests that start, in batch order.
    """

    prefill_ids_cpu: torch.Tensor | None = None
    mix_decode_rows: Ints | None = None
    encoder_ids_cpu: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HistoryWrites:
    """Token history to seed for rows that newly joined and use penalties: ids[i] are all known tokens of rows[i]."""

    rows: tuple[int, ...] = ()
    ids: tuple[npt.NDArray[np.int64], ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """B requests, T tokens, S sampling rows. This step works for the owner (rows[i], generations[i])."""

    step_id: int
    mode: ForwardMode
    rows: Ints
    """int64[B], no duplicates, never row 0."""
    generations: Ints
    """int64[B]."""
    prefix_lens: Ints
    """int64[B]: tokens whose KV is in the pools before this step; of a decode row the most that may be there."""
    lower_lens: Ints
    """int64[n]: the least that may be there of each decode row. How many there are is read on the forward stream."""
    extend_lens: Ints
    """int64[B]: tokens computed by this step; of a decode row the most, which is 1 without drafts."""
    num_extend: int
    """The first `num_extend` of the B rows are prefill segments, the rest decode rows."""
    num_tokens: int
    """Tokens computed by this step, at most."""
    table_writes: TableWrites
    sample_indices: Ints
    """int64[S]: which of the B rows sample (all decode rows, and prefill segments that end their prompt)."""
    sampling: SamplingBatch
    staging: InputStaging
    fresh_rows: Ints
    """int64[k]: rows that got a new owner since the last step; what the FutureMap holds for them is forgotten first."""
    history_writes: HistoryWrites = field(default_factory=HistoryWrites)
    companion_writes: Writes = field(default_factory=dict)
    """Companion name -> what its device side applies before anything in the step reads its pool."""
    after_idle: bool = False
    """There was no request to run before this step, so the gap before it does not count as idle time."""
    pooling: PoolingBatch | None = None
    """Segments of embeddings, if any."""
    scoring: ScoringBatch | None = None
    """Prompt tokens whose log probabilities are told, if any."""
    vision: VisionBatch | None = None
    """Images whose tokens are computed, and positions that are not the usual ones, if any."""
    encoder_features: tuple[Floats, ...] = ()
    """What the encoder reads in place of staged ids, which then only count: sounds, [mels, frames] each."""
    encoder_lens: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[n]: tokens of each encoder input that is staged, in batch order; they add up to E."""
    grammar_seeds: tuple[GrammarSeed, ...] = ()
    """Seeds of rows that newly joined and are constrained."""
    host_backs: tuple[CopyBack, ...] = ()
    """Rows, all of them fresh, that go on from host memory."""
    spec: SpecPlan | None = None
    """How far decode rows may run ahead on drafts; None where speculation is off."""

    @property
    def seq_lens(self) -> Ints:
        """int64[B]: tokens in the pools after this step; of a decode row the most that may be there."""
        return self.prefix_lens + self.extend_lens

    @property
    def num_decode(self) -> int:
        """Decode rows of this step."""
        return len(self.rows) - self.num_extend

    @property
    def num_inputs(self) -> int:
        """Tokens whose ids are staged or relayed: those of chunks, and the newest one of each decode row."""
        if self.spec is None:
            return self.num_tokens
        if not self.num_extend:
            return len(self.rows)
        return int(self.extend_lens[: self.num_extend].sum()) + self.num_decode

    @property
    def verifies(self) -> bool:
        """Whether some decode row may have drafts to verify."""
        return self.spec is not None and self.spec.verifies

    @property
    def sample_rows(self) -> Ints:
        """int64[S]: pool rows that sample."""
        return self.rows[self.sample_indices]

    @property
    def sample_generations(self) -> Ints:
        """int64[S]: the owners those tokens are for."""
        return self.generations[self.sample_indices]
