"""Batches between ranks arrive as they were, and bytes of anything else make nothing."""

from __future__ import annotations

import dataclasses
import json
import random
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.schedule_batch import ForwardMode, InputStaging
from core.distributed.wire import CLASSES, decode, encode
from core.memory.host_moves import CopyBack, CopyOut, HostCopy, Rejoined
from core.memory.req_to_token_pool import TableWrites
from core.models.lora.packed import Adapter, Place
from core.models.lora.slots import LoraWrites, SlotWrite


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def over(value: Any, pinned: list[torch.Tensor] | None = None) -> Any:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if pinned is not None:
            pinned.append(tensor)
        return tensor.clone()

    return decode(np.frombuffer(bytearray(encode(value)), np.uint8).data, pin)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


VALUES = {
    "numbers": (None, True, -3, 2**60, 0.1, float("inf"), "a\0ß"),
    "mode": ForwardMode.MIXED,
    "arrays": (ints(), ints(5, -7), np.ones((2, 3), np.float32), np.array([True, False]), np.uint8([1, 2, 3])),
    "odd sizes": tuple(np.arange(count, dtype=np.uint8) for count in (1, 2, 3, 5, 7)),
    "writes": {"mamba": TableWrites(ints(1, 2), ints(3, 4), ints(5, 6), 16)},
    "copies": CopyOut((HostCopy(3, 7, ints(1, 4)),), ints(*range(7)), (1, 2)),
    "backs": (
        CopyBack((HostCopy(3, 7, ints(1)),), 2, ints(9, 8)),
        Rejoined((HostCopy(1, 2, ints(2)),), 0, ints(4), 5, 6),
    ),
    "numpy scalars": (int(np.int64(4)),),
}


@pytest.mark.parametrize("name", VALUES)
def test_it_arrives_as_it_was(name: str) -> None:
    assert same(over(VALUES[name]), VALUES[name])


def test_numpy_scalars_arrive_as_numbers() -> None:
    assert over((np.int64(4), np.float32(0.5))) == (4, 0.5)


def test_tensors_go_where_the_device_copies_from_and_arrays_may_be_written() -> None:
    pinned: list[torch.Tensor] = []
    staging = InputStaging(torch.arange(5), ints(3), None)
    found = over(staging, pinned)
    assert len(pinned) == 1 and torch.equal(found.prefill_ids_cpu, torch.arange(5))
    found.mix_decode_rows[0] = 9


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass
class Unknown:
    number: int = 3


@pytest.mark.parametrize("value", [object(), Unknown(), Colour.RED, {1, 2}, b"bytes", np.array([object()])])
def test_nothing_else_is_sent(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        over((1, value))


def message(head: dict[str, Any], rest: bytes = b"") -> memoryview:
    text = json.dumps(head).encode()
    return np.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + rest), np.uint8).data


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("|O", [1]), (",8", [1]), ("<U9", [1]), ("<i8", [-1]), ("<i8", [10**30]), ("<i8", [3]), ("<i8", "x")],
)
def test_no_array_is_made_of_what_is_none(kind: str, shape: Any) -> None:
    """Of no objects, no texts, no more bytes than there are, and no names that numpy would read as something."""
    with pytest.raises(ValueError, match="no message of another rank: an array"):
        decode(message({"array": kind, "shape": shape, "tensor": False}, bytes(16)), torch.clone)


def test_brackets_without_end_are_no_message() -> None:
    text = b"[" * 100_000
    with pytest.raises(ValueError, match="no message of another rank"):
        decode(np.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), np.uint8).data, torch.clone)


def test_broken_bytes_are_told_as_such() -> None:
    whole = encode(VALUES["arrays"])
    for data in (whole[:-3], whole[:20], b"", message({"class": "object", "fields": {}}), message({"enum": "int"})):
        with pytest.raises(ValueError, match="no message of another rank"):
            decode(np.frombuffer(bytearray(data), np.uint8).data if len(data) else memoryview(b""), torch.clone)


def test_every_class_that_travels_is_made_of_what_does() -> None:
    assert all(dataclasses.is_dataclass(each) for each in CLASSES.values())
    assert set(CLASSES) >= {"ScheduleBatch", "CopyOut", "Rejoined"}


def test_bytes_of_anything_else_make_nothing(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole, refused = encode(VALUES["copies"]), 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(0, len(data))] if rng.random() < 0.5 else data
        try:
            decode(np.frombuffer(data, np.uint8).data if data else memoryview(b""), torch.clone)
        except ValueError:
            refused += 1
    assert refused > 100, "and no other error came"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_arrive_in_the_type_of_their_model(dtype: torch.dtype) -> None:
    """numpy has no such numbers, or would make others of them."""
    values = torch.tensor([1.0, -2.5, float("inf"), 3.1e-5], dtype=dtype)
    adapter = Adapter(values, {"layers.0.up": Place(0, 2, 1, 2, 2)}, "digest")
    found = over(LoraWrites((SlotWrite(3, adapter), SlotWrite(4, None))))
    (filled, emptied) = found.slots
    assert filled.slot == 3 and filled.adapter.buffer.dtype == dtype and filled.adapter.buffer.equal(values)
    assert (filled.adapter.places, filled.adapter.digest) == (adapter.places, "digest")
    assert (emptied.slot, emptied.adapter) == (4, None)


def test_arrays_that_do_not_travel_are_refused_where_they_are_sent() -> None:
    with pytest.raises(TypeError, match="arrays of complex64 do not travel"):
        encode(np.zeros(1, np.complex64))


@pytest.mark.parametrize(
    "head",
    [
        {"class": "SpecPlan", "fields": 3},
        {"half": "torch.bfloat16", "bits": 5},
        {"array": "|u1", "shape": [0, 1 << 70], "tensor": False},
    ],
)
def test_words_of_another_form_are_told_as_such(head: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no message of another rank"):
        decode(message(head), torch.clone)
