"""What a step that is launched sends to the device, in one transfer. Inputs of replays have static memory instead."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch.build import chunk_places
from core.batch.ragged import starts_of
from core.batch.schedule_batch import ScheduleBatch
from core.device.parcel import Parcel
from core.device.staging import Staging
from core.executor import rejoining_rows
from core.executor.device_state import DeviceState
from core.executor.sampling_step import StepSampling
from core.executor.verification import Attempt
from core.memory.companion import Carried
from core.relay.resolve import all_staged
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arrays of one `ScheduleBatch` on the device, int64 each."""

    rows: torch.Tensor
    """[B]."""
    lower: torch.Tensor
    """[n]: the least length of each decode row before the step."""
    upper: torch.Tensor
    """[n]: the most."""
    last: torch.Tensor
    """[S]: places in T of the tokens whose logits are wanted; [S + P] where prompt tokens are told."""
    fresh: torch.Tensor
    """[F]: rows with a new owner."""
    staged: list[torch.Tensor]
    """What `all_staged` found."""
    places: tuple[torch.Tensor, ...]
    """What `chunk_places` made; empty without chunks."""
    segments: tuple[torch.Tensor, torch.Tensor] | None
    """See `ForwardBatch`; None without chunks."""
    sampled: torch.Tensor | None
    """[S]: which rows of the batch sample; None for all."""
    table: tuple[torch.Tensor, ...]
    """Rows, places and pages of `TableWrites`, [n] each; empty if nothing is written."""
    staging: Staging
    """Finds what came along."""

    @classmethod
    def send(cls, batch: ScheduleBatch, staging: Staging, carried: Sequence[np.ndarray]) -> StepInputs:
        """Upload them, and `carried` with them. Clears nothing that is staged."""
        chunks, writes = batch.num_extend, batch.table_writes
        last = sampled_places(batch)
        if batch.scoring is not None:
            last = batch.scoring.beside(last)
        staged = all_staged(batch.staging)
        places = chunk_places(batch) if chunks else ()
        segments = (starts_of(batch.extend_lens[:chunks]), batch.prefix_lens[:chunks]) if chunks else ()
        # In the middle of a prompt a row has a length to publish, but samples nothing.
        sampled = (batch.sample_indices,) if len(batch.sample_indices) < len(batch.rows) else ()
        table = (writes.rows, writes.places, writes.pages) if len(writes.rows) else ()
        own = (batch.rows, batch.lower_lens, batch.prefix_lens[chunks:], last, batch.fresh_rows)
        groups = (own, staged, places, segments, sampled, table, carried)
        arrived = iter(staging.upload([array for group in groups for array in group]))
        rows, lower, upper, last_on_device, fresh = _next(arrived, own)
        return cls(
            *(rows, lower, upper, last_on_device, fresh, list(_next(arrived, staged)), _next(arrived, places)),
            segments=(next(arrived), next(arrived)) if segments else None,
            sampled=next(arrived) if sampled else None,
            table=_next(arrived, table),
            staging=Parcel(staging, carried, _next(arrived, carried)),
        )


def sampled_places(batch: ScheduleBatch) -> Ints:
    """int64[S]: places in T of the tokens behind which rows sample."""
    # Without chunks each row has one token, which stands in the place of its row.
    return np.cumsum(batch.extend_lens)[batch.sample_indices] - 1 if batch.num_extend else batch.sample_indices


def _next(arrived: Iterator[torch.Tensor], sent: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
    """As many as were `sent`."""
    return tuple(next(arrived) for _ in sent)


def carried(
    batch: ScheduleBatch,
    state: DeviceState,
    sampling: StepSampling,
    attempt: Attempt | None = None,
    captured: Container[str] | None = None,
) -> list[np.ndarray]:
    """Host arrays of others that go to the device with the inputs of the step: those very objects.

    `attempt`: what it tries of drafts; a replay has it among its inputs. `captured`: companions whose look-ups a replay
    does, None where the step is launched. Where uploads are no transfers there is nothing to save, and nothing is
    carried.
    """
    if not state.staging.pins:
        return []
    arrays = [*sampling.carried(batch, attempt), *rejoining_rows.carried(batch.host_backs)]
    if attempt is not None and captured is None:
        arrays += attempt.arrays
    for name, companion in state.companions.items():
        if isinstance(companion, Carried):
            replayed = captured is not None and name in captured
            arrays += companion.carried(batch.companion_writes.get(name), replayed)
    return arrays
