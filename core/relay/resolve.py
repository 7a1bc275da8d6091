"""Where the inputs of a step come from: the one resolve path for prompt ids, relayed tokens and their places.

Runs at forward entry on the forward stream. Prompt ids stay on the host until then (SGLang #25945), decode tokens come
out of the FutureMap, and a mixed step takes both. The encoder's ids come the same way but in a tensor of their own,
so they need not be stripped from the prompt ids as in SGLang.

Where a decode row stands is read here too, not in the plan: the plan knows bounds, since how many tokens the step
before has accepted is known on the device first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.batch.schedule_batch import InputStaging
from core.invariants import check
from core.relay.compiled import Entered
from core.relay.future_map import FutureMap
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The n decode rows of a step on the device, int64[n] each, and what the plan knows of them."""

    rows: torch.Tensor
    lower: torch.Tensor
    """The least number of tokens that each may have in the pools before this step."""
    upper: torch.Tensor
    """The most."""

    def enter(self, future_map: FutureMap, after: torch.Tensor | None = None) -> Entered:
        """Their newest tokens, which this consumes, and where these stand; `after` as in `FutureMap.enter`."""
        return future_map.enter(self.rows, self.lower, self.upper, after)

    def behind(self, chunks: Sequence[torch.Tensor], entered: Entered | None) -> tuple[torch.Tensor, ...]:
        """(row and position of each token of a step, int64[T] each; lengths after it, int64[B]).

        `chunks`: the same three of its prompt chunks; empty where it has none. `entered`: the decode rows as `enter`
        returned them; None where the step has none.
        """
        if entered is None:
            return tuple(chunks)
        tails = (self.rows, entered.lens, entered.after)
        return tuple(map(torch.cat, zip(chunks, tails, strict=True))) if chunks else tails


@dataclass(frozen=True, slots=True)
class ResolvedInputs:
    """Input ids of one step on the device, and where its decode rows stand."""

    ids: torch.Tensor
    """int64[T]."""
    encoder_ids: torch.Tensor | None
    """int64[E], read by the encoder only; None when the step encodes no input."""
    decode_lens: torch.Tensor
    """int64[n]: tokens of each decode row in the pools before this step."""
    entered: Entered | None = None
    """The decode rows; None where there is none."""


def resolve_forward_inputs(
    staging: InputStaging,
    decode: DecodeRows,
    future_map: FutureMap,
    num_tokens: int,
    num_encoder_tokens: int = 0,
    sent: Sequence[torch.Tensor] | None = None,
) -> ResolvedInputs:
    """The `num_tokens` input ids of a step, prefill ids first, then one token per decode row.

    Three cases:
    (1) Nothing is staged: decode, all ids come from `future_map` (law 7).
    (2) Prompt ids are staged: prefill.
    (3) Prompt ids and decode rows are staged: mixed.

    Staged encoder ids, `num_encoder_tokens` of them, end in `encoder_ids`. `sent`: all that was staged, prompt ids
    first, where it has gone to the device with the step's other inputs; None where that is still to be done. The
    staging is cleared only after everything succeeded, so a failed copy leaves it whole. Raises InvariantViolation when
    the ids are not as many as planned.
    """
    device = decode.rows.device
    prompt = staging.prefill_ids_cpu
    entered = decode.enter(future_map) if prompt is None or staging.mix_decode_rows is not None else None
    if prompt is None:
        assert entered is not None
        ids = entered.ids
    else:
        ids = prompt.to(device, non_blocking=True) if sent is None else sent[0]
        ids = ids if entered is None else torch.cat([ids, entered.ids])
    decode_lens = decode.rows[:0] if entered is None else entered.lens
    check("resolve_length", ids.numel() == num_tokens, got=ids.numel(), expected=num_tokens)
    encoder = staging.encoder_ids_cpu
    staged = 0 if encoder is None else encoder.numel()
    check("encoder_length", staged == num_encoder_tokens, got=staged, expected=num_encoder_tokens)
    encoder_ids = None
    if encoder is not None:
        encoder_ids = encoder.to(device, non_blocking=True) if sent is None else sent[-1]
    clear(staging)
    return ResolvedInputs(ids, encoder_ids, decode_lens, entered)


def all_staged(staging: InputStaging) -> list[Ints]:
    """Prompt ids and encoder ids, int64, as far as there are some: to be sent, and given back as `sent`."""
    staged = (staging.prefill_ids_cpu, staging.encoder_ids_cpu)
    return [ids.numpy() for ids in staged if ids is not None]


def staged_ids(staging: InputStaging, num_tokens: int) -> Ints:
    """int64[num_tokens] on the host: the prompt ids of a step that sends them with its other inputs, in one transfer.

    They stay staged: `clear` comes when the transfer is on its way. Raises InvariantViolation when the ids are not as
    many as planned.
    """
    staged = staging.prefill_ids_cpu
    assert staged is not None and staging.encoder_ids_cpu is None, "others go by `resolve_forward_inputs`"
    check("resolve_length", staged.numel() == num_tokens, got=staged.numel(), expected=num_tokens)
    ids: Ints = staged.numpy()
    return ids


def clear(staging: InputStaging) -> None:
    """Forget what was staged: it is on its way to the device."""
    staging.prefill_ids_cpu = None
    staging.mix_decode_rows = None
    staging.encoder_ids_cpu = None
