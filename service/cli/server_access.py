"""The options with which a command reaches a server: its address, token and TLS files, and the client made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_SERVER: Final = "127.0.0.1:50051"
MAX_PORT: Final = 65535

_OPTIONS = (
    ("--token-file", "With --server: present the first token of this file."),
    ("--tls-ca", "With --server: use TLS, and trust these authorities."),
    ("--tls-cert", "With --tls-ca: the client's own certificate."),
    ("--tls-key", "With --tls-cert: its private key."),
)

_PORTLESS = re.compile(r"(unix|unix-abstract|vsock):", re.IGNORECASE)
"""Schemes after which comes the path of a socket, or an address with ports of its own kind."""

_SCHEME = re.compile(r"(dns|ipv4|ipv6):(//[^/]*/)?", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"(?:\[[^]]*\]|[^:]*):([+-]?[0-9]+)\s*")


class ServerTarget(click.ParamType[str]):
    """`host:port`, or another target of gRPC (`unix:…`, `dns:///…`, `ipv4:…`), which is passed on as it is.

    gRPC takes a port modulo 65536, so a port beyond that would reach another server.
    """

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the target as text. Fails for an empty one, and for a port that is not 1 to MAX_PORT."""
        target = str(value)
        if not target.strip():
            self.fail("must not be empty", param, ctx)
        if not _PORTLESS.match(target):
            for address in _SCHEME.sub("", target, count=1).split(","):
                found = _HOST_AND_PORT.fullmatch(address)
                if found and not _is_port(found[1]):
                    self.fail(f"the port of {address!r} must be between 1 and {MAX_PORT}", param, ctx)
        return target


def _is_port(digits: str) -> bool:
    significant = digits.removeprefix("+").lstrip("0")
    return len(significant) <= len(str(MAX_PORT)) and 1 <= int(significant or 0) <= MAX_PORT


def server_option(text: str, default: str | None = None) -> Callable[[Command], Command]:
    """Add `--server`, with `text` as its help; the command takes it as `server`."""
    return click.option(
        "--server", metavar="HOST:PORT", type=ServerTarget(), default=default, show_default=True, help=text
    )


def access_options(command: Command) -> Command:
    """Add the options for token and TLS files; the command takes them as keywords of their names."""
    for flag, text in reversed(_OPTIONS):
        command = click.option(flag, metavar="FILE", help=text)(command)
    return command


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The values of `access_options` that were given to a command; None for the others."""

    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> ServerAccess:
        """The four values, removed from a command's `options`."""
        return cls(**{name: options.pop(name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")})

    def client(self, server: str) -> SlipstreamClient:
        """A client of `server`, to be closed. Raises StartupError for a token or TLS file that cannot be used."""
        from service.access.tls_credentials import ClientTls
        from service.access.token_file import first_token
        from service.client import SlipstreamClient

        files = (self.tls_ca, self.tls_cert, self.tls_key)
        tls = ClientTls.read(*files) if any(files) else None
        token = None if self.token_file is None else first_token(self.token_file)
        return SlipstreamClient(server, tls=tls, token=token)
