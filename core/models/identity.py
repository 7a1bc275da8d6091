"""What tells checkpoints apart without reading their weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checkpoint_identity(folder: Path) -> str:
    """Of a checkpoint: its configuration, and the names and sizes of its weights."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
