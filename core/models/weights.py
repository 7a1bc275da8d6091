"""Finds a checkpoint's safetensors shards and proves them whole before anything tries to load them.

Without this check a truncated download fails minutes later, inside a library, without the file's name. Reads headers
only.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.models.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Shards that passed the check, and the bytes of each of their tensors, by name."""

    shards: tuple[Path, ...]
    tensors: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors.values())


def check_weight_files(directory: Path) -> WeightFiles:
    """Validate every shard of `directory`. Raises ModelLoadError, which names the first bad file and what is wrong."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    # In the order in which transformers looks, so that the checked files are the loaded ones.
    if single.is_file():
        return WeightFiles((single,), dict(_tensors(single)))
    if not index.is_file():
        raise ModelLoadError(_nothing_to_load(directory))
    tensors, shards = dict[str, int](), _shards_by_index(directory, index)
    for shard, expected in shards.items():
        found = dict(_tensors(shard))
        absent = expected - found.keys()
        if absent:
            raise ModelLoadError(f"{shard} lacks tensor {min(absent)!r}, which {INDEX_FILE} places there")
        tensors |= found
    return WeightFiles(tuple(shards), tensors)


def _nothing_to_load(directory: Path) -> str:
    pickles = sorted(p.name for pattern in PICKLES for p in directory.glob(pattern))
    if pickles:
        return f"{directory} has only {pickles[0]}; weights are read from safetensors files alone, so convert it first"
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    if others:
        return f"{directory} has {others[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}"
    return f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}"


def _shards_by_index(directory: Path, index: Path) -> dict[Path, set[str]]:
    """Tensor names by shard, as the index has them."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        # A shard lies beside its index; a path that leads elsewhere is a mistake or an attack.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ModelLoadError(f"{index}: {name!r} is no file name")
        shards.setdefault(directory / name, set()).add(tensor)
    missing = sorted(p.name for p in shards if not p.is_file())
    if missing:
        raise ModelLoadError(f"{directory} lacks {missing[0]}, which {INDEX_FILE} names ({len(missing)} missing)")
    return shards


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor of one shard, after checking that together they fill the file exactly."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            if len(head) < 8:
                raise ModelLoadError(f"{file} is truncated: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER_BYTES:
                raise ModelLoadError(f"{file} is corrupt: it claims a header of {length} bytes")
            if length > size - 8:
                raise ModelLoadError(f"{file} is truncated: its header needs {length + 8} bytes, the file has {size}")
            header = stream.read(length)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    yield from _check_header(file, header, size - 8 - length)


def _check_header(file: Path, header: bytes, data_size: int) -> Iterator[tuple[str, int]]:
    try:
        entries = json.loads(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is corrupt: its header is not valid JSON") from error
    if not isinstance(entries, dict):
        raise ModelLoadError(f"{file} is corrupt: its header is no JSON object")
    entries.pop("__metadata__", None)
    ranges = sorted((*_range(file, name, entry), name) for name, entry in entries.items())
    position = 0
    for start, end, name in ranges:
        if start != position:
            raise ModelLoadError(f"{file} is corrupt: tensor {name!r} starts at byte {start}, expected {position}")
        position = end
        yield name, end - start
    if position > data_size:
        raise ModelLoadError(f"{file} is truncated: its tensors need {position} bytes, it holds {data_size}")
    if position < data_size:
        raise ModelLoadError(f"{file} is corrupt: {data_size - position} bytes belong to no tensor")


def _range(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Byte range of one tensor, checked against its shape and dtype."""
    try:
        (start, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
        whole = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (start, end, *shape))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ModelLoadError(f"{file} is corrupt: the header entry of tensor {name!r} is malformed")
    bits = ITEM_BITS.get(dtype)
    if end < start or (bits is not None and (end - start) * 8 != math.prod(shape) * bits):
        raise ModelLoadError(f"{file} is corrupt: tensor {name!r} has {end - start} bytes for {dtype} of shape {shape}")
    return start, end
