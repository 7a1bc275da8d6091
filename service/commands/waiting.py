"""Commands wait for a server that is still loading its model: told, bounded, and for nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_WAIT: Final = 300.0
POLL_SECONDS: Final = 0.25


def wait_option(command: Command) -> Command:
    """Adds `--wait`; the command takes it as `wait`, in seconds."""
    return click.option(
        "--wait",
        metavar="SECONDS",
        type=click.FloatRange(0),
        default=DEFAULT_WAIT,
        show_default=True,
        help="With --server: wait so long, at most, for a server that is still loading its model. A server that does "
        "not answer at all is not waited for.",
    )(command)


async def wait_until_loaded(client: SlipstreamClient, server: str, seconds: float) -> None:
    """Return once the server at `server` has loaded its model, or is in a state that no waiting changes.

    The first answer that it is loading is told on stderr. Raises ClickException, exit status 1, with advice: when there
    is no server, when it goes away while it loads, and when it still loads after `seconds`.
    """
    if not await _is_loading(client, f"no server answers at {server}; start one with: slipstream serve"):
        return
    click.echo(f"slipstream: the server at {server} is loading its model; waiting at most {seconds:g} s", err=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, until - time.monotonic())))
        if not await _is_loading(client, f"the server at {server} went away while it was loading; its log says why"):
            return
    raise click.ClickException(
        f"the server at {server} is still loading after {seconds:g} s; wait longer with --wait SECONDS"
    )


async def _is_loading(client: SlipstreamClient, unreachable: str) -> bool:
    """Whether it says so; False also where it does not say, so that the call itself is told why it fails."""
    import grpc

    from service.client import CallFailed
    from service.pb.slipstream.v1 import inference_pb2 as pb

    try:
        return bool((await client.server_info()).state == pb.SERVER_STATE_STARTING)
    except CallFailed as failure:
        # A server that refuses says its reason; without one no server has answered.
        if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
            raise click.ClickException(f"{unreachable} ({failure.message})") from None
        return False
