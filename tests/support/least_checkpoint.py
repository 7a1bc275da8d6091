"""The least that passes for a checkpoint before it is opened; tests.support.checkpoints makes real ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_checkpoint(folder: Path) -> Path:
    """Write a config and one safetensors file of four bytes, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return folder
