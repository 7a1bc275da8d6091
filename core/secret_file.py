"""Secrets that processes of a cluster share, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from core.errors import ConfigError

LEAST_SECRET: Final = 16
"""Bytes."""


def read_secret(setting: str, file: str | None) -> bytes:
    """What is in `file`, which the setting of that name gives; empty without one.

    Raises ConfigError for a file that cannot be read, or has less than LEAST_SECRET bytes.
    """
    if file is None:
        return b""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}: {file}") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"{setting}: a secret has at least {LEAST_SECRET} bytes; this one {len(secret)}")
    return secret
