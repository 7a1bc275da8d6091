"""Steps of padding before the first real one, so that nothing is compiled or pinned while requests wait.

Triton compiles a kernel when it is launched first: seconds on the forward thread, with every stream of the engine
behind it. Captured steps are launched before they are recorded, those that no graph takes are not. So the attention
backend names steps that between them launch all that these need, and they are run on padding when the engine is built.
A model that drafts has launches of its own, for prompts too: it runs over the same padding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import NO_HIDDEN, HiddenRequest
from core.batch.schedule_batch import ForwardMode
from core.executor.device_state import DeviceState
from core.executor.verification import Verification
from core.memory.companion import Rehearsed

logger = logging.getLogger(__name__)

MOST_PINNED = 1 << 21
"""Bytes of the largest pinned block that is touched: a prompt of 8,192 tokens, their rows, places and pages take a
third of it. All sizes together take 16 times as much."""


ENCODER_TOKENS = 2
"""Of the input that comes with padding; an encoder compiles nothing, whatever its length."""


@torch.inference_mode()
def rehearse(state: DeviceState, speculator: Verification | None = None) -> None:
    """Run what the attention backend names. A model that fails is served all the same; the log says what it said.

    Where other processes take part in forward passes it raises what the model does: they would wait in the middle.
    """
    state.staging.touch_sizes(MOST_PINNED)
    attention = state.attention
    if attention is None or state.model.spec.whole_prompts:  # such a model has an attention of its own
        return
    named = attention.rehearsals(state.pool.size, state.streams.device)
    steps = [lens for lens in named if max(lens, default=1) <= state.pool.max_context_len]
    if not steps:
        return
    began = time.monotonic()
    try:
        with state.streams.on_forward():
            for lens in steps:
                batch = padding(state, lens, NO_HIDDEN if speculator is None else speculator.needs_hidden)
                _begin(state, batch)
                state.model.forward(batch)
                if speculator is not None:
                    speculator.rehearse(batch)
        state.streams.synchronize()
    except Exception as error:
        if not state.alone:
            raise
        # Whatever a backend raises: Triton's errors, of a kernel that does not fit, are no RuntimeErrors.
        logger.warning("kernels are compiled by the first steps: %s", str(error).partition("\n")[0])
        return
    logger.info("rehearsed %d steps in %.1f s", len(steps), time.monotonic() - began)


def _begin(state: DeviceState, batch: ForwardBatch) -> None:
    """As a step does, tell the companions that recurrent layers and cross attention read."""
    encoder_tokens = 0 if batch.encoder_lens_host is None else int(batch.encoder_lens_host.sum())
    for companion in state.companions.values():
        if isinstance(companion, Rehearsed):
            writes = companion.padding(batch.extend_lens_host, encoder_tokens)
            companion.begin(batch.rows, writes, state.staging)


def padding(state: DeviceState, lens: Sequence[int], hidden: HiddenRequest = NO_HIDDEN) -> ForwardBatch:
    """Prompts of `lens` tokens, all of them of row 0 and into slot 0 (law 6); the decode step of one row if empty.

    `hidden`: what drafts are made from.

    The first prompt for an encoder-decoder comes with an input.
    """
    inputs = [ENCODER_TOKENS] if lens and state.model.spec.encoder is not None else []
    extend = np.array(lens or [1], np.int64)
    rows, positions, ids, slots, last, encoder_ids = state.staging.upload(
        [
            np.zeros_like(extend),
            np.concatenate([np.arange(each) for each in extend]),
            *(np.zeros(int(extend.sum()), np.int64) for _ in range(2)),
            np.zeros(1, np.int64),
            np.zeros(sum(inputs), np.int64),
        ]
    )
    return ForwardBatch(
        mode=ForwardMode.EXTEND if lens else ForwardMode.DECODE,
        input_ids=ids,
        positions=positions,
        rows=rows,
        seq_lens=state.staging.upload([extend])[0],
        out_cache_loc=slots,
        last_indices=last,
        req_to_token=state.pool.table,
        kv_pool=state.kv_pool,
        num_extend=len(lens),
        prefix_lens_host=np.zeros_like(extend),
        extend_lens_host=extend,
        wants_hidden=hidden.final,
        wants_layers=hidden.layers,
        encoder_ids=encoder_ids if inputs else None,
        encoder_lens_host=np.array(inputs, np.int64) if inputs else None,
    )
