"""`slipstream adapters`: see and change which LoRA adapters a running server has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from service.cli.commands.waiting import wait_option, wait_until_loaded
from service.cli.server_access import DEFAULT_SERVER, ServerAccess, access_options, server_option

if TYPE_CHECKING:
    from service.client.adapters import Adapter, AdapterClient

COLUMNS = ("name", "state", "rank", "bytes", "pinned", "requests", "idle")

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


@click.group()
def adapters() -> None:
    """List, load and unload the LoRA adapters of a running server.

    \b
    slipstream serve --lora-dir /models/adapters --unnamed-callers all
    slipstream adapters load french                 the directory /models/adapters/french
    slipstream adapters load french v2/french       another one, under the same name
    slipstream generate --server 127.0.0.1:50051 --adapter french "Bonjour"
    """


def _reaching(command: Command) -> Command:
    return server_option("Ask it.", DEFAULT_SERVER)(wait_option(access_options(command)))


@adapters.command(name="list")
@_reaching
def list_command(server: str, wait: float, **options: Any) -> None:
    """Show what is loaded: rank, bytes on the device, who uses it, when it was last used."""
    listed = _ask(server, wait, options, lambda client: client.list())
    rows = [COLUMNS, *map(_row, listed.adapters)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"{listed.used_bytes} of {listed.max_bytes} bytes")


@adapters.command()
@click.argument("name")
@click.argument("path", default="")
@click.option("--pin", is_flag=True, help="Never evict it for others.")
@_reaching
def load(name: str, path: str, pin: bool, server: str, wait: float, **options: Any) -> None:
    """Load the adapter in PATH, below the server's --lora-dir, as NAME. Without PATH it is the one called NAME."""
    loaded = _ask(server, wait, options, lambda client: client.load(name, path, pinned=pin))
    click.echo(f"loaded {name}: rank {loaded.adapter.rank}, {loaded.adapter.bytes} bytes")
    for each in loaded.evicted:
        click.echo(f"evicted {each}")


@adapters.command()
@click.argument("name")
@_reaching
def unload(name: str, server: str, wait: float, **options: Any) -> None:
    """Unload NAME: new requests do not find it, those that use it run to their end."""
    left = _ask(server, wait, options, lambda client: client.unload(name))
    click.echo(f"unloaded {name}" + (f"; {left} requests still use it" if left else ""))


def _ask(
    server: str, wait: float, options: dict[str, Any], question: Callable[[AdapterClient], Awaitable[Result]]
) -> Result:
    """The server's answer. A failed call ends in one line and exit status 1. Raises StartupError for unusable files."""
    from service.client import CallFailed
    from service.client.adapters import AdapterClient

    access = ServerAccess.taken_from(options)

    async def asked() -> Result:
        async with access.client(server) as client:
            await wait_until_loaded(client, server, wait)
            return await question(AdapterClient(client))

    try:
        return asyncio.run(asked())
    except CallFailed as failure:
        raise click.ClickException(str(failure)) from None


def _row(adapter: Adapter) -> tuple[str, ...]:
    from service.client.adapters import state_of

    idle = f"{adapter.idle.seconds} s" if adapter.HasField("idle") else "never used"
    pinned = "yes" if adapter.pinned else "no"
    figures = str(adapter.rank), str(adapter.bytes), pinned, str(adapter.live_requests), idle
    return adapter.name, state_of(adapter), *figures
