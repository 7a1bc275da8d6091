"""Times the model, before it serves, for the choice of which drafts a step verifies."""

from __future__ import annotations

import statistics
import time
from typing import Final

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.executor.device_state import DeviceState
from core.scheduler.draft_depth import StepTimes

TOKENS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens of the steps that are timed."""
ROUNDS: Final = 5
PATIENCE: Final = 1.0
"""Seconds after which no further size is begun: beyond the last one, times go on along a line."""


@torch.inference_mode()
def time_steps(state: DeviceState, draft_room: int | None = None) -> StepTimes:
    """What `state.model` takes for steps of several tokens: medians, made to rise. Waits for the device.

    The steps are of padding row 0, whose keys, values and states no request reads. `draft_room`: the most drafts of a
    step, None without a limit.
    """
    seconds: list[float] = []
    began = time.monotonic()
    for tokens in TOKENS:
        # Other ranks run the same steps: all of them, whatever clock they go by.
        late = state.alone and len(seconds) > 1 and time.monotonic() - began > PATIENCE
        # A step of one row: there are no positions, and no entries of the table, beyond the context.
        most = min(state.model.spec.context_length, state.pool.max_context_len)
        if late or tokens > most or (draft_room is not None and tokens - 1 > draft_room):
            break
        seconds.append(max(_median(state, tokens), *seconds[-1:], 0.0))
    return StepTimes(TOKENS[: len(seconds)], tuple(seconds))


def _median(state: DeviceState, tokens: int) -> float:
    """Seconds of one size; the first round warms up."""
    found = []
    for _ in range(ROUNDS + 1):
        batch = _padding(state, tokens)
        for companion in state.companions.values():
            companion.begin(batch.rows, None, state.staging)
        began = time.perf_counter()
        state.model.forward(batch)
        state.streams.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _padding(state: DeviceState, tokens: int) -> ForwardBatch:
    """A step of row 0 alone: `tokens` tokens at slot 0, all of whose logits are wanted."""
    device = state.streams.device
    zeros, places = torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device)
    decode = tokens == 1
    return ForwardBatch(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        input_ids=zeros,
        positions=places,
        rows=zeros[:1],
        seq_lens=torch.full((1,), tokens, device=device),
        out_cache_loc=zeros,
        last_indices=places,
        req_to_token=state.pool.table,
        kv_pool=state.kv_pool,
        num_extend=0 if decode else 1,
        prefix_lens_host=np.zeros(1, np.int64),
        extend_lens_host=np.full(1, tokens),
        verifies=not decode,
    )
