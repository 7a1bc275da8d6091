"""Turns a planned step into the frozen arrays of a `ScheduleBatch`. Knows lengths and slots, not requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.batch.grammar_batch import GrammarSeed
from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.batch.ragged import walk_runs
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ForwardMode, HistoryWrites, InputStaging, ScheduleBatch
from core.batch.scoring_batch import ScoredSegment, ScoringBatch, scoring
from core.batch.spec_plan import SpecPlan
from core.batch.vision_batch import vision_batch
from core.memory.companion import Writes
from core.memory.host_moves import CopyBack
from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Floats, Ints
from core.types.image import PlacedImage
from core.types.io import Pooling


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt chunk: tokens `ids` (int64[n]) of `row`, the first at position `start`; `final` ends the prompt."""

    row: int
    start: int
    ids: Ints
    final: bool
    pooling: Pooling | None = None
    """Set for an embedding, which samples nothing at its end."""
    encoder_ids: Ints | None = None
    """int64[L]: input that the encoder reads before this chunk; with the first chunk of an admission only."""
    encoder_features: Floats | None = None
    """[mels, frames]: what it reads in place of those ids, which then only count."""
    targets: Ints | None = None
    """int64[m]: prompt tokens behind the first m of `ids`, if their log probabilities are told."""
    top: int = 0
    """Alternatives that come with them."""
    images: tuple[PlacedImage, ...] = ()
    """Images whose tokens are all among `ids`."""
    places: Ints | None = None
    """int64[3, n]: positions of `ids`, where images have moved them."""

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.ids)

    @property
    def cost(self) -> int:
        """Tokens that the step computes for the chunk, those of the encoder included."""
        return self.length + (0 if self.encoder_ids is None else len(self.encoder_ids))


def joined(segments: list[Segment]) -> list[Segment]:
    """`segments` with consecutive chunks of a row joined into one, in the place of the first."""
    by_row: dict[int, Segment] = {}
    for each in segments:
        first = by_row.get(each.row)
        if first is not None:
            # The last token of a prompt alone has none behind it.
            targets = first.targets
            if targets is not None and each.targets is not None:
                targets = np.concatenate([targets, each.targets])
            places = each.places
            if places is not None and first.places is not None:
                places = np.concatenate([first.places, places], axis=1)
            ids, images = np.concatenate([first.ids, each.ids]), first.images + each.images
            each = replace(first, ids=ids, final=each.final, targets=targets, images=images, places=places)
        by_row[each.row] = each
    return list(by_row.values())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the planner decided for one step."""

    step_id: int
    segments: list[Segment]
    """Prompt chunks, at most one per row."""
    decode_rows: Ints
    """int64[n]: rows that compute one token each, and the drafts behind it."""
    decode_lens: Ints
    """int64[n]: the most tokens that `decode_rows` may have in the pools before this step."""
    decode_lower: Ints
    """int64[n]: the least, which is the same where speculation is off."""
    table_writes: TableWrites
    fresh_rows: Ints
    """int64[k]: rows that got a new owner since the last step."""
    history_writes: HistoryWrites
    after_idle: bool
    grammar_seeds: tuple[GrammarSeed, ...] = ()
    host_backs: tuple[CopyBack, ...] = ()
    spec: SpecPlan | None = None
    """None where speculation is off."""
    deltas: Ints | None = None
    """int64[n]: what images of `decode_rows` add to positions; None where they add nothing."""

    @property
    def decode_counts(self) -> Ints:
        """int64[n]: the most tokens that each decode row computes."""
        return np.ones(len(self.decode_rows), np.int64) if self.spec is None else self.spec.drafts + 1


def build_batch(
    plan: StepPlan,
    generations: Ints,
    sampling: Callable[[Ints, Ints, Ints], SamplingBatch],
    pin: Callable[[list[Ints]], torch.Tensor],
    companions: Callable[[Ints, Ints, Ints, Ints | None], Writes],
) -> ScheduleBatch:
    """The frozen batch of `plan`.

    `generations`: int64 by row. `sampling(rows, lower, upper)`: options of the rows that sample, for tokens behind at
    least and at most so many others. `pin`: copies token ids to memory that the device can copy from, end to end.
    `companions(rows, prefix_lens, extend_lens, ahead)`: plans the companions' part of the step, and returns their
    device writes; the lengths are the least that rows may have, and `ahead` how many tokens more that may be, None
    where speculation is off. All arrays are int64.
    """
    num_extend, num_decode = len(plan.segments), len(plan.decode_rows)
    rows, prefix_lens, extend_lens, sample_indices = _rows(plan)
    upper = lower = prefix_lens + extend_lens
    known, counts, ahead = prefix_lens, extend_lens, None
    if plan.spec is not None and plan.spec.exact:
        ahead = np.zeros(len(rows), np.int64)
    elif plan.spec is not None:
        upper[num_extend:] = np.minimum(upper[num_extend:], plan.spec.limits)
        lower, known = plan.decode_lower + 1, plan.decode_lower
        if num_extend:
            lower = np.concatenate([upper[:num_extend], lower])
            known = np.concatenate([prefix_lens[:num_extend], known])
        counts, ahead = lower - known, upper - lower
    inputs = [s.encoder_ids for s in plan.segments if s.encoder_ids is not None]
    return ScheduleBatch(
        step_id=plan.step_id,
        mode=ForwardMode.of(num_extend, num_decode),
        rows=rows,
        generations=generations[rows],
        prefix_lens=prefix_lens,
        lower_lens=plan.decode_lower,
        extend_lens=extend_lens,
        num_extend=num_extend,
        num_tokens=int(extend_lens.sum()),
        table_writes=plan.table_writes,
        sample_indices=sample_indices,
        sampling=sampling(*(each[sample_indices] if num_extend else each for each in (rows, lower, upper))),
        staging=InputStaging(
            prefill_ids_cpu=pin([s.ids for s in plan.segments]) if plan.segments else None,
            mix_decode_rows=plan.decode_rows if num_extend and num_decode else None,
            encoder_ids_cpu=pin(inputs) if inputs else None,
        ),
        encoder_features=tuple(s.encoder_features for s in plan.segments if s.encoder_features is not None),
        encoder_lens=_ints(len(ids) for ids in inputs) if inputs else NO_INTS,
        fresh_rows=plan.fresh_rows,
        history_writes=plan.history_writes,
        companion_writes=companions(rows, known, counts, ahead),
        after_idle=plan.after_idle,
        pooling=_pooling(plan.segments, generations),
        scoring=_scoring(plan.segments, generations),
        vision=vision_batch(plan.segments, plan.deltas),
        grammar_seeds=plan.grammar_seeds,
        host_backs=plan.host_backs,
        spec=plan.spec,
    )


def _rows(plan: StepPlan) -> tuple[Ints, Ints, Ints, Ints]:
    """(rows, prefix and extend lengths, int64[B] each; which of the rows sample, int64[S])."""
    segments, decodes = plan.segments, np.arange(len(plan.decode_rows))
    rows = plan.decode_rows, plan.decode_lens, plan.decode_counts
    # Steady decode pays for no empty arrays.
    if not segments:
        return *rows, decodes
    chunks = _ints(s.row for s in segments), _ints(s.start for s in segments), _ints(s.length for s in segments)
    finals = np.fromiter((s.final and s.pooling is None for s in segments), np.bool_, len(segments))
    places = np.concatenate([np.flatnonzero(finals), decodes + len(segments)])
    joint = [np.concatenate(each) for each in zip(chunks, rows, strict=True)]
    return joint[0], joint[1], joint[2], places


NO_INTS: Ints = np.empty(0, np.int64)


def token_positions(prefix_lens: Ints, extend_lens: Ints) -> Ints:
    """int64[T]: the position of every computed token in its own sequence, in input order."""
    run, behind = walk_runs(extend_lens)
    positions: Ints = prefix_lens[run] + behind
    return positions


def chunk_places(batch: ScheduleBatch) -> tuple[Ints, Ints, Ints]:
    """(row and position of each token of the prompt chunks, int64[Tp] each; lengths behind them, int64[num_extend])."""
    chunks = batch.num_extend
    prefix, extend = batch.prefix_lens[:chunks], batch.extend_lens[:chunks]
    return np.repeat(batch.rows[:chunks], extend), token_positions(prefix, extend), prefix + extend


def _pooling(segments: list[Segment], generations: Ints) -> PoolingBatch | None:
    """The embedding segments of the step; None in almost every step, which has none."""
    if all(s.pooling is None for s in segments):
        return None
    pooled, end = [], 0
    for s in segments:
        end += s.length
        if s.pooling is not None:
            pooled.append(PooledSegment(s.row, end - s.length, end, s.start, s.pooling, s.final))
    rows = _ints(p.row for p in pooled if p.final)
    return PoolingBatch(tuple(pooled), rows, generations[rows])


def _scoring(segments: list[Segment], generations: Ints) -> ScoringBatch | None:
    """The prompt tokens of the step whose log probabilities are told; None in almost every step, which has none."""
    if all(s.targets is None for s in segments):
        return None
    scored, end = [], 0
    for s in segments:
        if s.targets is not None:
            scored.append(ScoredSegment(s.row, end, s.start + 1, s.targets))
        end += s.length
    return scoring(scored, generations, max(s.top for s in segments))


def _ints(values: object) -> Ints:
    return np.fromiter(values, np.int64)  # type: ignore[call-overload,no-any-return]
