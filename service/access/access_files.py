"""The files about callers: their tokens, tenants' limits, certificates. Each file is read again when it changes."""

from __future__ import annotations

from service.access.reloaded_file import Reloaded
from service.access.tenant_file import TenantBook, tenants_file
from service.access.tls_files import TlsFiles, tls_files
from service.access.token_file import TokenBook, token_file
from service.config.server_config import ServerConfig


class AccessFiles:
    """The files that `config` names; None for the others. Raises StartupError for a file that cannot be used."""

    def __init__(self, config: ServerConfig) -> None:
        self.tokens: Reloaded[TokenBook] | None = None
        self.tenants: Reloaded[TenantBook] | None = None
        if config.auth_token_file is not None:
            self.tokens = token_file(config.auth_token_file)
        if config.tenants_file is not None:
            self.tenants = tenants_file(config.tenants_file)
        self.certificates: Reloaded[TlsFiles] | None = tls_files(config)

    def failed(self) -> dict[str, bool]:
        """For each kind of file, whether it cannot be used as it is now. Any thread may call it."""
        files = {"tokens": self.tokens, "tenants": self.tenants, "certificates": self.certificates}
        return {kind: False if file is None else file.failed for kind, file in files.items()}
