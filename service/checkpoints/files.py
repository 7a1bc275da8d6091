"""Whether the files of a checkpoint are there and whole: found in milliseconds, before anything heavy is imported.

The loaders check again, and more.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError

_HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 * 1024 * 1024


def check_model(path: Path) -> None:
    """Raise ModelLoadError if `path` cannot be a checkpoint: missing files, or weights shorter than they say."""
    if not path.is_dir():
        bare = not path.is_absolute() and len(path.parts) == 1
        advice = "; a model of a hub is named ORG/NAME" if bare else ""
        raise ModelLoadError(f"model directory {path} does not exist{advice}")
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"model directory {path} has no config.json")
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise ModelLoadError(f"model directory {path} has no *.safetensors files; other weight formats are not read")
    for missing in sorted(_indexed_shards(path) - {shard.name for shard in shards}):
        raise ModelLoadError(f"model directory {path} lacks {missing}, which its index names")
    for shard in shards:
        check_shard(shard)


def _indexed_shards(path: Path) -> set[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelLoadError(f"{index} is not a safetensors index") from None


def check_shard(shard: Path) -> None:
    """Raise ModelLoadError unless the header can be read and the file is exactly as long as its tensors need."""
    if not shard.is_file():
        # Opening a pipe would wait for its writer for ever.
        raise ModelLoadError(f"{shard} is no regular file")
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
            if length > min(MAX_HEADER_BYTES, size):
                raise ModelLoadError(f"{shard} is truncated: its header is longer than the file")
            header = json.loads(file.read(length))
        needed = _HEADER_LENGTH.size + length + _data_bytes(header)
    except OSError as error:
        raise ModelLoadError(f"{shard} cannot be read: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelLoadError(f"{shard} is not a safetensors file: its header cannot be read") from None
    if size != needed:
        kind = "truncated" if size < needed else "longer than its header says"
        raise ModelLoadError(f"{shard} is {kind}: {size} bytes instead of {needed}")


def _data_bytes(header: dict[str, Any]) -> int:
    return max((int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"), default=0)
