"""Batches between ranks, as bytes: what they are made of by name, and arrays as they lie in memory.

A message is made of the classes that are listed here and of nothing else, whichever process sent it: there are no
pickles. Pickles that peers took from sockets were remote code execution (vLLM's CVE-2025-32444).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import ForwardMode, HistoryWrites, InputStaging, ScheduleBatch
from core.batch.scoring_batch import ScoringBatch
from core.batch.spec_plan import Aim, SpecPlan
from core.executor.verification import Attempt
from core.memory.host_moves import CopyBack, CopyOut, HostCopy, Rejoined
from core.memory.recurrent.state_slots import StateWrites, Tracked
from core.memory.req_to_token_pool import TableWrites
from core.memory.window.window_pages import WindowWrites
from core.models.lora.packed import Adapter, Place
from core.models.lora.slots import LoraWrites, SlotWrite
from core.speculation.guesses import Guesses
from core.types.io import Pooling

CLASSES: Final[dict[str, Any]] = {
    each.__name__: each
    for each in (
        *(Adapter, Aim, Attempt, Guesses, LoraWrites, Place, SlotWrite, SpecPlan),
        *(
            CopyBack,
            CopyOut,
            HistoryWrites,
            HostCopy,
            InputStaging,
            PooledSegment,
            PoolingBatch,
            Rejoined,
            SamplingBatch,
        ),
        *(ScheduleBatch, ScoringBatch, StateWrites, TableWrites, Tracked, WindowWrites),
    )
}
DTYPES: Final = frozenset(np.dtype(each).str for each in ("?", "u1", "i1", "i2", "i4", "i8", "f4", "f8"))
"""Of arrays: numbers of a few kinds, which numpy reads without a look at what they are."""
HALVES: Final = {str(each): each for each in (torch.bfloat16, torch.float16)}
"""Of tensors that travel as 16-bit numbers: numpy knows one of them, and no tensor is made of it."""
ENUMS: Final[dict[str, Any]] = {each.__name__: each for each in (ForwardMode, Pooling)}
_ALIGNED: Final = 8
_LENGTH: Final = 8

Pin = Callable[[torch.Tensor], torch.Tensor]
"""Puts a tensor where the device can copy from it by itself."""


def encode(value: Any) -> bytes:
    """`value` as bytes. Raises TypeError for what is made of anything but the classes here, and arrays."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_packed(value, arrays)).encode()
    parts = [len(head).to_bytes(_LENGTH, "little"), head]
    at = _LENGTH + len(head)
    for array in arrays:
        gap = -at % _ALIGNED
        parts += [bytes(gap), array.tobytes()]
        at += gap + array.nbytes
    return b"".join(parts)


def decode(data: memoryview, pin: Pin) -> Any:
    """What `encode` had. Arrays lie in the memory of `data`, tensors where `pin` puts them.

    Raises ValueError for bytes that it did not make.
    """
    length = int.from_bytes(data[:_LENGTH], "little")
    try:
        return _Reader(data, _LENGTH + length, pin).value(json.loads(bytes(data[_LENGTH : _LENGTH + length])))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise ValueError(f"no message of another rank: {error}") from error


def _packed(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and str(value.dtype) in HALVES:
        return {"half": str(value.dtype), "bits": _packed(value.view(torch.int16), arrays)}
    if isinstance(value, np.ndarray | torch.Tensor):
        array = np.ascontiguousarray(value.numpy() if isinstance(value, torch.Tensor) else value)
        if array.dtype.str not in DTYPES:
            raise TypeError(f"arrays of {array.dtype} do not travel between ranks")
        arrays.append(array)
        return {"array": array.dtype.str, "shape": array.shape, "tensor": isinstance(value, torch.Tensor)}
    if isinstance(value, tuple | list):
        return [_packed(each, arrays) for each in value]
    if isinstance(value, Mapping):
        return {"map": [[_packed(key, arrays), _packed(each, arrays)] for key, each in value.items()]}
    name = type(value).__name__
    if isinstance(value, Enum) and name in ENUMS:
        return {"enum": name, "value": value.value}
    if name in CLASSES and type(value) is CLASSES[name]:
        fields = {each.name: _packed(getattr(value, each.name), arrays) for each in _fields(type(value))}
        return {"class": name, "fields": fields}
    raise TypeError(f"{name} does not travel between ranks")


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """What its constructor takes; it makes the rest of them."""
    return [each for each in dataclasses.fields(kind) if each.init]


class _Reader:
    """Takes arrays off `data` in the order in which they were packed, from `at` on."""

    def __init__(self, data: memoryview, at: int, pin: Pin) -> None:
        self._data = data
        self._at = at
        self._pin = pin

    def value(self, packed: Any) -> Any:
        if isinstance(packed, list):
            return tuple(self.value(each) for each in packed)
        if not isinstance(packed, dict):
            return packed
        if "array" in packed:
            return self._array(packed)
        if "half" in packed:
            return self.value(packed["bits"]).view(HALVES[packed["half"]])
        if "map" in packed:
            return {self.value(key): self.value(each) for key, each in packed["map"]}
        if "enum" in packed:
            return ENUMS[packed["enum"]](packed["value"])
        made = {name: self.value(each) for name, each in packed["fields"].items()}
        return CLASSES[packed["class"]](**made)

    def _array(self, packed: dict[str, Any]) -> np.ndarray | torch.Tensor:
        self._at += -self._at % _ALIGNED
        name, shape = packed["array"], tuple(packed["shape"])
        if name not in DTYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"an array of {name} in the shape {shape}")
        dtype, count = np.dtype(name), math.prod(shape)
        if count * dtype.itemsize > len(self._data) - self._at:
            raise ValueError("an array that is cut off")
        array = np.frombuffer(self._data, dtype, count, self._at).reshape(shape)
        self._at += array.nbytes
        return self._pin(torch.from_numpy(array)) if packed["tensor"] else array
