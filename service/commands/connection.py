"""The options by which a command reaches a server, and the client that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Command = TypeVar("Command", bound=Callable[..., Any])

ACCESS = ("token_file", "tls_ca", "tls_cert", "tls_key")


def connection_options(command: Command) -> Command:
    """Adds `--server` and what is needed to be let in."""
    for option in reversed(
        (
            click.option("--server", metavar="HOST:PORT", help="Ask this server instead of loading a model here."),
            click.option("--token-file", metavar="FILE", help="With --server: present the first token of this file."),
            click.option("--tls-ca", metavar="FILE", help="With --server: use TLS, and trust these authorities."),
            click.option("--tls-cert", metavar="FILE", help="With --tls-ca: the client's own certificate."),
            click.option("--tls-key", metavar="FILE", help="With --tls-cert: its private key."),
        )
    ):
        command = option(command)
    return command


def connect(server: str, access: dict[str, str | None]) -> SlipstreamClient:
    """A client of `server`; `access` holds the options of ACCESS. Raises StartupError for a file that is no use."""
    from service.auth_tokens import first_token
    from service.client import SlipstreamClient
    from service.tls_credentials import ClientTls

    files = (access["tls_ca"], access["tls_cert"], access["tls_key"])
    tls = ClientTls.read(*files) if any(files) else None
    token = None if access["token_file"] is None else first_token(access["token_file"])
    return SlipstreamClient(server, tls=tls, token=token)
