"""torchao's four-bit weights in groups, of linear layers and without quantised activations, in its two plain layouts.

`IntxUnpackedToInt8Tensor` has a number of -8..7 to a byte. `Int4Tensor` has two, the even input in the low bits, scales
and zeros [groups, N], and a zero that is added to the scaled number: (q - 8) scale + zero. Its own product needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.models.quantized.grouped import MIDDLE, GroupedWeight, keep_dense, keep_grouped, pack_nibbles
from core.models.quantized.registry import DENSE


def keep_int4(model: nn.Module, held: str) -> None:
    """Have linear layers with such weights keep them in groups, or widened if `held` says so."""
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        reader = READERS.get(type(module.weight).__name__)
        weight = None if reader is None else reader(module.weight)
        if weight is not None:
            dtype = module.weight.dtype
            keep_grouped(module, weight)
            if held == DENSE:
                keep_dense(module, dtype)


def _unpacked(weight: Any) -> GroupedWeight | None:
    if str(weight.target_dtype) != "torch.int4" or weight.activation_quantization is not None or weight.shape[1] % 2:
        return None
    if weight.block_size[0] != 1:
        return None
    zero = weight.zero_point
    shifted = None if not bool(zero.any()) else zero.to(zero.dtype if zero.is_floating_point() else torch.int8) + MIDDLE
    return GroupedWeight(pack_nibbles(weight.qdata + MIDDLE), weight.scale, shifted, int(weight.block_size[1]))


def _packed(weight: Any) -> GroupedWeight | None:
    if weight.act_pre_scale is not None or weight.activation_dtype != torch.bfloat16 or weight.qdata.dim() != 2:
        return None
    scale = weight.scale.t().float().contiguous()
    zero = MIDDLE - weight.zero_point.t().float() / scale
    # Numbers are signed; so the highest bit turns round where they become 0..15.
    return GroupedWeight(weight.qdata.view(torch.uint8) ^ 0x88, scale, zero.contiguous(), int(weight.block_size[-1]))


READERS = {"IntxUnpackedToInt8Tensor": _unpacked, "Int4Tensor": _packed}
"""By the name of the tensor's class. None: the library goes on with it."""
