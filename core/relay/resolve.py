"""Where the input ids of a step come from: the one resolve path for prompt ids and relayed tokens.

Runs at forward entry on the forward stream. Prompt ids stay on the host until then (SGLang #25945), decode tokens come
out of the FutureMap, and a mixed step takes both. The encoder's ids come the same way but in a tensor of their own,
so they need not be stripped from the prompt ids as in SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.batch.schedule_batch import InputStaging
from core.invariants import check
from core.relay.future_map import FutureMap


@dataclass(frozen=True, slots=True)
class InputIds:
    """Input ids of one step on the device."""

    ids: torch.Tensor
    """int64[T]."""
    encoder_ids: torch.Tensor | None
    """int64[E], read by the encoder only; None when the step encodes no input."""


def resolve_forward_inputs(
    staging: InputStaging,
    decode_rows: torch.Tensor,
    decode_lens: torch.Tensor | None,
    future_map: FutureMap,
    num_tokens: int,
    num_encoder_tokens: int = 0,
) -> InputIds:
    """The `num_tokens` input ids of a step, prefill ids first, then one token per decode row.

    Three cases:
    (1) Nothing is staged: decode, all ids come from `future_map` (law 7).
    (2) Prompt ids are staged: prefill.
    (3) Prompt ids and decode rows are staged: mixed.

    `decode_rows` and `decode_lens`, int64[n] each, are on the device. Staged encoder ids, `num_encoder_tokens` of them,
    end in `encoder_ids`. The staging is cleared only after everything succeeded, so a failed copy leaves it whole.
    Raises InvariantViolation when the ids are not as many as planned.
    """
    prompt = staging.prefill_ids_cpu
    if prompt is None:
        ids = future_map.gather(decode_rows, decode_lens)
    else:
        ids = prompt.to(decode_rows.device, non_blocking=True)
        if staging.mix_decode_rows is not None:
            ids = torch.cat([ids, future_map.gather(decode_rows, decode_lens)])
    check("resolve_length", ids.numel() == num_tokens, got=ids.numel(), expected=num_tokens)
    encoder = staging.encoder_ids_cpu
    staged = 0 if encoder is None else encoder.numel()
    check("encoder_length", staged == num_encoder_tokens, got=staged, expected=num_encoder_tokens)
    encoder_ids = None if encoder is None else encoder.to(decode_rows.device, non_blocking=True)
    staging.prefill_ids_cpu = None
    staging.mix_decode_rows = None
    staging.encoder_ids_cpu = None
    return InputIds(ids, encoder_ids)
