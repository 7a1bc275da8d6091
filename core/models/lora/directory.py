"""Which directory a client means by a path: one below the operator's root, by whatever links, or none.

What lies outside is answered as what does not exist, so that nobody can ask what the machine has. Links are followed
and judged by where they end, because stores of models are made of links. Who can write below the root can change it
between this look and the reading; that is the operator's, never a client's.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from core.errors import ModelLoadError
from core.models.lora.checkpoint import WEIGHTS_FILE
from core.models.lora.config import CONFIG_FILE

MAX_PATH_CHARS = 512

_MISSING = "there is no such directory below the server's directory of adapters"


def directory_below(root: Path, path: str) -> Path:
    """The existing directory `path` below `root`, links resolved. Raises ModelLoadError; no place is in its message."""
    parts = PurePosixPath(path).parts
    wild = not path.isprintable() or "\\" in path or len(path) > MAX_PATH_CHARS
    if wild or not parts or path.startswith("/") or ".." in parts:
        raise ModelLoadError(f"must be a relative path of at most {MAX_PATH_CHARS} characters without '..'")
    try:
        top = root.resolve(strict=True)
        found = top.joinpath(*parts).resolve(strict=True)
        inside = [found, *(found / name for name in (CONFIG_FILE, WEIGHTS_FILE))]
        # A file that is not there is its reader's to complain of, by name.
        escaped = any(not each.resolve().is_relative_to(top) for each in inside)
    except (OSError, RuntimeError, ValueError):
        raise ModelLoadError(_MISSING) from None
    if escaped or not found.is_dir():
        raise ModelLoadError(_MISSING)
    return found
