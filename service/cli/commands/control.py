"""`slipstream control`: pause a running server, change its weights, have it give its memory back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from service.cli.commands.waiting import wait_option, wait_until_loaded
from service.cli.server_access import DEFAULT_SERVER, ServerAccess, access_options, server_option
from service.process.sizes import shown

if TYPE_CHECKING:
    from service.client.control import ControlClient

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


@click.group()
def control() -> None:
    """Pause a running server, change its weights, have it give its memory back.

    \b
    slipstream serve --model /models/step-0 --weights-dir /models --unnamed-callers all
    slipstream control pause                        streams wait where they are
    slipstream control update step-100 --path step-100    the directory /models/step-100, called step-100
    slipstream control resume
    slipstream control sleep                        give device memory back; streams wait
    slipstream control wake
    """


def _reaching(command: Command) -> Command:
    return server_option("Ask it.", DEFAULT_SERVER)(wait_option(access_options(command)))


@control.command()
@click.option("--end", is_flag=True, help="End streams and refuse requests meanwhile, for other replicas to take.")
@_reaching
def pause(end: bool, server: str, wait: float, **options: Any) -> None:
    """Compute no further step until `resume`. Streams and new requests wait."""
    live = _ask(server, wait, options, lambda client: client.pause(end=end))
    click.echo(f"paused; {live} streams {'ended' if end else 'wait'}")


@control.command()
@_reaching
def resume(server: str, wait: float, **options: Any) -> None:
    """Go on after `pause`."""
    _ask(server, wait, options, lambda client: client.resume())
    click.echo("resumed")


@control.command()
@click.argument("weight_version")
@click.option("--path", default="", metavar="DIR", help="Directory below the server's --weights-dir.")
@click.option("--name", default="", metavar="ORG/NAME", help="Instead, a model of the hub, with @REVISION if you like.")
@_reaching
def update(weight_version: str, path: str, name: str, server: str, wait: float, **options: Any) -> None:
    """Serve other weights of the same model, and call them WEIGHT_VERSION. Without --path and --name: the directory of
    that name. Streams go on from their tokens; cached prefixes are forgotten."""
    if path and name:
        raise click.UsageError("--path or --name, not both")
    done = _ask(server, wait, options, lambda client: client.update_weights(weight_version, path=path, name=name))
    took = f"loaded in {_seconds(done.load)}, no step for {_seconds(done.held)}"
    restarted = f", {done.restarted_requests} requests computed again" if done.restarted_requests else ""
    click.echo(f"{done.weight_version} is served instead of {done.replaced_version}: {took}{restarted}")


@control.command()
@_reaching
def sleep(server: str, wait: float, **options: Any) -> None:
    """Give device memory back until `wake`. Streams and new requests wait."""
    nap = _ask(server, wait, options, lambda client: client.sleep())
    click.echo(f"asleep; {shown(nap.freed_bytes)} given back, {nap.live_requests} streams wait")


@control.command()
@_reaching
def wake(server: str, wait: float, **options: Any) -> None:
    """Take the memory again and go on."""
    _ask(server, wait, options, lambda client: client.wake())
    click.echo("awake")


def _seconds(duration: Any) -> str:
    return f"{duration.seconds + duration.nanos / 1e9:.2f} s"


def _ask(
    server: str, wait: float, options: dict[str, Any], question: Callable[[ControlClient], Awaitable[Result]]
) -> Result:
    """The server's answer. A failed call ends in one line and exit status 1. Raises StartupError for unusable files."""
    from service.client import CallFailed
    from service.client.control import ControlClient

    access = ServerAccess.taken_from(options)

    async def asked() -> Result:
        async with access.client(server) as client:
            await wait_until_loaded(client, server, wait)
            return await question(ControlClient(client))

    try:
        return asyncio.run(asked())
    except CallFailed as failure:
        raise click.ClickException(str(failure)) from None
