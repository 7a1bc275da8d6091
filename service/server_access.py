"""The options with which a command reaches a server: token and TLS files, and the client made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    ("--token-file", "With --server: present the first token of this file."),
    ("--tls-ca", "With --server: use TLS, and trust these authorities."),
    ("--tls-cert", "With --tls-ca: the client's own certificate."),
    ("--tls-key", "With --tls-cert: its private key."),
)


def access_options(command: Command) -> Command:
    """Adds the options; the command takes them as keywords of their names."""
    for flag, text in reversed(_OPTIONS):
        command = click.option(flag, metavar="FILE", help=text)(command)
    return command


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """What was given of them."""

    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> ServerAccess:
        """The four of them, removed from a command's `options`."""
        return cls(**{name: options.pop(name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")})

    def client(self, server: str) -> SlipstreamClient:
        """A client of `server`, to be closed. Raises StartupError for a token or TLS file that cannot be used."""
        from service.auth_tokens import first_token
        from service.client import SlipstreamClient
        from service.tls_credentials import ClientTls

        files = (self.tls_ca, self.tls_cert, self.tls_key)
        tls = ClientTls.read(*files) if any(files) else None
        token = None if self.token_file is None else first_token(self.token_file)
        return SlipstreamClient(server, tls=tls, token=token)
