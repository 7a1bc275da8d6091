"""Finds the directory that a client's path names: one below the operator's root, also through links, or none.

A directory outside the root gets the same answer as a missing one, so that a client cannot explore the machine. Links
are followed and judged by where they end, because stores of models are made of links. A process that can write below
the root could change it between this check and the reading; only the operator can do that, never a client.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from core.errors import ModelLoadError
from core.models.lora.checkpoint import WEIGHTS_FILE
from core.models.lora.config import CONFIG_FILE

MAX_PATH_CHARS = 512

_MISSING = "there is no such directory below the server's directory of adapters"


def directory_below(root: Path, path: str) -> Path:
    """The existing directory `path` below `root`, links resolved. Raises ModelLoadError, without a path in it."""
    parts = PurePosixPath(path).parts
    wild = not path.isprintable() or "\\" in path or len(path) > MAX_PATH_CHARS
    if wild or not parts or path.startswith("/") or ".." in parts:
        raise ModelLoadError(f"must be a relative path of at most {MAX_PATH_CHARS} characters without '..'")
    try:
        top = root.resolve(strict=True)
        found = top.joinpath(*parts).resolve(strict=True)
        inside = [found, *(found / name for name in (CONFIG_FILE, WEIGHTS_FILE))]
        # A missing file passes here: the code that reads it reports it by name.
        escaped = any(not each.resolve().is_relative_to(top) for each in inside)
    except (OSError, RuntimeError, ValueError):
        raise ModelLoadError(_MISSING) from None
    if escaped or not found.is_dir():
        raise ModelLoadError(_MISSING)
    return found
