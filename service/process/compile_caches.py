"""Directories into which PyTorch and Triton compile, made sure before they are imported.

PyTorch makes its own as it is imported. Where that fails, as in a volume that belongs to another user, the process ends
with a traceback. What is compiled is kept between starts, and no start needs it: another place will do.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping

from core.errors import StartupError

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables of the environment that name them. Without the first, PyTorch takes the directory of temporary files."""

log = logging.getLogger(__name__)


def use_writable_caches(environ: MutableMapping[str, str]) -> None:
    """Have each variable of NAMES that names a directory which cannot be written name a fresh temporary one instead.

    To be called before torch is imported. Raises StartupError if a temporary directory is needed and there is none.
    """
    for name in NAMES:
        reason = None if name not in environ else _why_unusable(environ[name])
        if reason is not None:
            fresh = _temporary(f"{name} {environ[name]} cannot be used ({reason})")
            log.warning("%s %s cannot be used (%s): %s takes its place", name, environ[name], reason, fresh)
            environ[name] = fresh
    if NAMES[0] not in environ:
        _temporary_root("PyTorch needs a directory to compile into")


def _why_unusable(path: str) -> str | None:
    """None where files can be made in `path`, which is made if need be."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _temporary(because: str) -> str:
    return tempfile.mkdtemp(prefix="slipstream-", dir=_temporary_root(because))


def _temporary_root(because: str) -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise StartupError(
            f"{because}, and no directory for temporary files can be written: mount one at /tmp, or name it in TMPDIR"
        ) from None
