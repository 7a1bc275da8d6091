"""TLS credentials for grpc: of a server whose certificate files can change, and of a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from service.access.reloaded_file import Reloaded
from service.access.tls_files import TlsFiles, check_ca, check_pair


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM contents: the authorities to trust (None: the system's), and a client's own certificate for mutual TLS."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(cls, ca: str | None = None, cert: str | None = None, key: str | None = None) -> ClientTls:
        """Read the contents from files. Raises StartupError, which names the file that cannot be used."""
        paths = [path for path in (ca, cert, key) if path is not None]
        found = Reloaded("TLS files", paths, lambda contents: dict(zip(paths, contents, strict=True))).current()
        tls = cls(*(None if path is None else found[path] for path in (ca, cert, key)))
        if ca is not None and tls.ca is not None:
            check_ca(tls.ca, Path(ca))
        if cert is not None and key is not None and tls.cert is not None and tls.key is not None:
            check_pair(tls.cert, tls.key, cert, key)
        return tls

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a secure channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def server_credentials(files: Reloaded[TlsFiles]) -> grpc.ServerCredentials:
    """Credentials that look for new files at every handshake. Open connections keep the certificate they began with."""
    served = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # On grpc's threads, under its lock. None means "as before".
        nonlocal served
        newest = files.current()
        if newest is served:
            return None
        served = newest
        return _configuration(newest)

    required = served.client_ca is not None
    # The stubs do not know that None is allowed.
    return grpc.dynamic_ssl_server_credentials(_configuration(served), fetch, required)  # type: ignore[arg-type]


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.client_ca)
