"""Finds the directory that a client's path names: one below the operator's root, also through links, or none.

A directory outside the root gets the same answer as a missing one, so that a client cannot explore the machine. Links
are followed and judged by where they end, because stores of models are made of links. A process that can write below
the root could change it between this check and the reading; only the operator can do that, never a client.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from core.errors import ModelLoadError

MAX_PATH_CHARS = 512


def directory_below(root: Path, path: str, what: str) -> Path:
    """The existing directory `path` below `root`, links resolved, with no file in it that leads out of there.

    `what` the root holds, for the error. Raises ModelLoadError, without a path in it.
    """
    missing = ModelLoadError(f"there is no such directory below the server's directory of {what}")
    parts = PurePosixPath(path).parts
    wild = not path.isprintable() or "\\" in path or len(path) > MAX_PATH_CHARS
    if wild or not parts or path.startswith("/") or ".." in parts:
        raise ModelLoadError(f"must be a relative path of at most {MAX_PATH_CHARS} characters without '..'")
    try:
        top = root.resolve(strict=True)
        found = top.joinpath(*parts).resolve(strict=True)
        # A missing file passes here: the code that reads it reports it by name.
        escaped = any(not each.resolve().is_relative_to(top) for each in (found, *found.iterdir()))
    except (OSError, RuntimeError, ValueError):
        raise missing from None
    if escaped:
        raise missing
    return found
