"""AWQ with four bits, in the layout that AutoAWQ calls GEMM.

`qweight` int32[K, N / 8] and `qzeros` int32[groups, N / 8] have eight outputs to a word, in an order of their own;
`scales` is [groups, N]. Zeros are kept as they are.
"""

from __future__ import annotations

import torch

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.quantized.grouped import GroupedWeight, pack_nibbles
from core.models.quantized.packed_files import BadPart, PackedFormat, Parts, expect, nibble_values, packed_method
from core.models.quantized.registry import QuantMethod, Settings

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word by output: 0, 2, 4, 6, 1, 3, 5, 7 lie in it from its lowest bits on."""


def awq(checkpoint: CheckpointConfig) -> QuantMethod:
    """How a checkpoint with `quant_method` awq is loaded."""
    return packed_method(AWQ, checkpoint, _check)


def _check(settings: Settings) -> None:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise ModelLoadError(f"awq weights of {bits!r} bits are not supported; those of 4 bits are")
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ModelLoadError(f"awq version {version!r} is not supported; 'gemm' is")
    if not isinstance(size := _group_size(settings), int) or isinstance(size, bool) or size < -1 or size == 0:
        raise ModelLoadError(f"awq group_size must be a positive number or -1, got {size!r}")


def _group_size(settings: Settings) -> int:
    size: int = settings.get("group_size", settings.get("q_group_size", 128))
    return size


def _read(parts: Parts, shape: tuple[int, int], settings: Settings) -> GroupedWeight:
    outputs, inputs = shape
    size = inputs if _group_size(settings) == -1 else _group_size(settings)
    groups = -(-inputs // size)
    words = expect(parts, "qweight", (inputs, -(-outputs // 8)))
    scale = expect(parts, "scales", (groups, outputs), None)
    zero = None
    if "qzeros" not in parts and settings.get("zero_point", True):
        raise BadPart("qzeros", "is missing, and the configuration has zero_point")
    if "qzeros" in parts:
        zero = _outputs(expect(parts, "qzeros", (groups, -(-outputs // 8))), outputs).to(torch.int8)
    return GroupedWeight(pack_nibbles(_outputs(words, outputs)), scale.t().contiguous(), zero, size)


def _outputs(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """uint8[N, R] of 0..15 from int32[R, N / 8]."""
    values = nibble_values(words).view(len(words), -1, 8)[:, :, PLACES]
    return values.reshape(len(words), -1)[:, :outputs].t().contiguous()


AWQ = PackedFormat(name="awq int4", parts=("qweight", "scales"), optional=("qzeros",), read=_read)
