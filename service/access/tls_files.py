"""Certificate, key and client CA: read, checked to fit together, and read again when they change.

The standard library's `ssl` checks them, because grpc reports a bad pair only by refusing every handshake. This file
imports no grpc, so that a bad file is reported before anything heavy is imported.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import StartupError
from service.access.reloaded_file import Reloaded
from service.config.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM contents that fit together. With `client_ca`, clients must present a certificate signed by it."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None


def tls_files(config: ServerConfig) -> Reloaded[TlsFiles] | None:
    """The TLS files that `config` names; None without TLS. Raises StartupError for files that cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    named, ca_path = (config.tls_cert, config.tls_key), config.tls_client_ca
    paths = named if ca_path is None else (*named, ca_path)

    def parse(contents: tuple[bytes, ...]) -> TlsFiles:
        cert, key = contents[:2]
        check_pair(cert, key, *named)
        if ca_path is None:
            return TlsFiles(cert, key)
        check_ca(contents[2], ca_path)
        return TlsFiles(cert, key, contents[2])

    return Reloaded("TLS files", paths, parse)


def check_pair(cert: bytes, key: bytes, cert_path: str | Path, key_path: str | Path) -> None:
    """Raise StartupError unless `cert` is a PEM chain and `key` the unencrypted key of its first certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # The library takes file names only. Memory files hold exactly the bytes that will be served, whatever happens to
    # the named ones in the meantime.
    with _MemoryFile(cert) as cert_name, _MemoryFile(key) as key_name:
        try:
            # An empty password, since without one an encrypted key would ask at the terminal.
            context.load_cert_chain(cert_name, key_name, password=b"")
        except (ssl.SSLError, ValueError, OSError) as error:
            reason = "do not belong together" if _mismatch(error) else "are not a PEM certificate and unencrypted key"
            raise StartupError(f"{cert_path} and {key_path} {reason}") from None


def check_ca(ca: bytes, path: str | Path) -> None:
    """Raise StartupError unless `ca` holds PEM certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise StartupError(f"{path}: holds no PEM certificate") from None


def _mismatch(error: Exception) -> bool:
    return getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"


class _MemoryFile:
    """Bytes under a name that a C library can open, never on a disk."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._descriptor = -1

    def __enter__(self) -> str:
        self._descriptor = os.memfd_create("slipstream-tls")
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            file.write(self._content)
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
