"""GPTQ with four bits, as AutoGPTQ and GPTQModel write it.

`qweight` int32[K / 8, N] has eight inputs to a word and `qzeros` int32[groups, N / 8] eight outputs, lowest bits first;
`scales` is [groups, N] and `g_idx` int32[K] the group of each input, which ascends unless layers were quantised in the
order of activations (`desc_act`). The first format keeps zeros less one, modulo 16; `gptq_v2` keeps them as they are.
"""

from __future__ import annotations

import torch

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.quantized.grouped import GroupedWeight, contiguous_groups
from core.models.quantized.packed_files import (
    BadPart,
    PackedFormat,
    Parts,
    expect,
    nibble_values,
    packed_method,
    word_nibbles,
)
from core.models.quantized.registry import QuantMethod, Settings

LESS = {"gptq": 1, "gptq_v2": 0}
"""What was taken off zeros, by `checkpoint_format`."""


def gptq(checkpoint: CheckpointConfig) -> QuantMethod:
    """How a checkpoint with `quant_method` gptq is loaded."""
    return packed_method(GPTQ, checkpoint, _check)


def _check(settings: Settings) -> None:
    if settings.get("bits") != 4:
        raise ModelLoadError(f"gptq weights of {settings.get('bits')!r} bits are not supported; those of 4 bits are")
    form = settings.get("checkpoint_format", "gptq")
    if not isinstance(form, str) or form not in LESS:
        raise ModelLoadError(f"gptq checkpoint_format {form!r} is not supported; supported are {', '.join(LESS)}")
    size = settings.get("group_size", 128)
    if not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0:
        raise ModelLoadError(f"gptq group_size must be a positive number or -1, got {size!r}")


def _read(parts: Parts, shape: tuple[int, int], settings: Settings) -> GroupedWeight:
    outputs, inputs = shape
    given = settings.get("group_size", 128)
    size = inputs if given == -1 else given
    groups = -(-inputs // size)
    words = expect(parts, "qweight", (-(-inputs // 8), outputs))
    scale = expect(parts, "scales", (groups, outputs), None)
    packed = expect(parts, "qzeros", (groups, -(-outputs // 8)))
    zero = (nibble_values(packed)[:, :outputs] + LESS[settings.get("checkpoint_format", "gptq")]) % 16
    weight = GroupedWeight(
        word_nibbles(words.t())[:, : inputs // 2].contiguous(),
        scale.t().contiguous(),
        zero.t().contiguous().to(torch.int8),
        size,
    )
    if "g_idx" not in parts:
        # Inputs that were sorted, taken as they come, would make a model of noise.
        if settings.get("desc_act") and groups > 1:
            raise BadPart("g_idx", "is missing, and the configuration has desc_act")
        return weight
    try:
        return contiguous_groups(weight, expect(parts, "g_idx", (inputs,)))
    except ValueError as error:
        raise BadPart("g_idx", f"cannot be served: {error}") from error


GPTQ = PackedFormat(name="gptq int4", parts=("qweight", "qzeros", "scales"), optional=("g_idx",), read=_read)
