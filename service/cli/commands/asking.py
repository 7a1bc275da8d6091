"""What commands that ask about texts have in common: texts of standard input, and an answer or why there is none."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from core.errors import SlipstreamError, StartupError
from service.cli.commands.waiting import wait_until_loaded
from service.cli.server_access import ServerAccess
from service.config.server_config import ServerConfig
from service.config.sources import load

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Answer = TypeVar("Answer")

WITHOUT = ("seed", "adapter", "max_lora_rank", "lora_dir")
"""Settings that mean nothing where no text is put out."""


class _Count(click.types.IntParamType):
    """A number that a message can hold; which of them make sense is the server's to say."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises BadParameter."""
        number = super().convert(value, param, ctx)
        if not -(2**31) <= number < 2**31:
            self.fail(f"{value} is beyond 32 bits", param, ctx)
        return number


COUNT = _Count()


@dataclass(frozen=True, slots=True)
class Where:
    """Where a command is answered: by the `server`, or without one by an engine in this process."""

    server: str | None
    wait: float
    access: ServerAccess
    adapter: str | None
    config_file: str | None
    options: dict[str, Any]
    """Of the engine."""

    @classmethod
    def told(
        cls, server: str | None, wait: float, adapter: str | None, config_file: str | None, options: dict[str, Any]
    ) -> Where:
        """As a command's options say. Raises UsageError for an adapter without a server."""
        if adapter and not server:
            raise click.UsageError("--adapter needs --server")
        access = ServerAccess.taken_from(options)
        return cls(server, wait, access, adapter, config_file, options)

    def config(self) -> ServerConfig:
        """The settings of the engine in this process. Raises StartupError."""
        return load(ServerConfig, self.options, os.environ, self.config_file)


def lines_of(texts: tuple[str, ...]) -> tuple[str, ...]:
    """`texts`, or the lines of standard input in place of a single -. Raises UsageError if there are none."""
    if texts != ("-",):
        return texts
    lines = tuple(line.rstrip("\r\n") for line in sys.stdin)
    if not lines:
        raise click.UsageError("standard input holds no text")
    return lines


def one_line(text: str) -> str:
    """`text` for a line of output: its line breaks become spaces."""
    return " ".join(text.split())


def answer(asked: Coroutine[Any, Any, Answer]) -> Answer:
    """What `asked` returns. Ends the command with one line where that is a typed error or a text is none, and on
    Ctrl-C."""
    try:
        return asyncio.run(asked)
    except StartupError:
        raise
    except SlipstreamError as error:
        raise click.ClickException(error.message) from None
    except UnicodeEncodeError:
        # Python holds bytes of arguments and of standard input that are no UTF-8 as halves of characters.
        raise click.ClickException("a text is no valid UTF-8") from None
    except KeyboardInterrupt:
        sys.exit(130)


async def of_server(where: Where, call: Callable[[SlipstreamClient], Awaitable[Answer]]) -> Answer:
    """What `call` returns of a client of the server. Raises StartupError for a token or TLS file of no use."""
    from service.client import CallFailed

    assert where.server, "the caller looks"
    async with where.access.client(where.server) as client:
        await wait_until_loaded(client, where.server, where.wait)
        try:
            return await call(client)
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None
