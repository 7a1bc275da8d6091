"""Commands wait for a server that is still loading its model: told, bounded, and for nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from service.cli.seconds import Seconds

if TYPE_CHECKING:
    from service.client import SlipstreamClient

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_WAIT: Final = 300.0
POLL_SECONDS: Final = 0.25

ANSWER_SECONDS = 5.0
"""What a server has to say how it is; it says so while it loads as well."""

SILENT_SECONDS: Final = 1.0
"""A server that has not answered for so long is not said to be still loading."""


class _Answer(Enum):
    """LOADING: the server says so. NONE: it said nothing in time. OTHER: anything else, an error among them, so that
    the call itself is told why it fails.
    """

    LOADING = auto()
    NONE = auto()
    OTHER = auto()


def wait_option(command: Command) -> Command:
    """Adds `--wait`; the command takes it as `wait`, in seconds."""
    return click.option(
        "--wait",
        metavar="SECONDS",
        type=Seconds(0),
        default=DEFAULT_WAIT,
        show_default=True,
        help="With --server: wait so long, at most, for a server that is still loading its model. A server that does "
        "not answer at all is not waited for.",
    )(command)


async def wait_until_loaded(client: SlipstreamClient, server: str, seconds: float) -> None:
    """Return once the server at `server` has loaded its model, or is in a state that no waiting changes.

    The first answer that it is loading is told on stderr. Raises ClickException, exit status 1, with advice: when there
    is no server or its first answer takes longer than ANSWER_SECONDS, when it goes away while it loads, and when after
    `seconds` it still loads or has stopped answering.
    """
    missing = f"no server answers at {server}; start one with: slipstream serve"
    first = await _asked(client, ANSWER_SECONDS, missing)
    if first is _Answer.NONE:
        raise click.ClickException(f"{missing} (no answer within {ANSWER_SECONDS:g} s)")
    if first is _Answer.OTHER:
        return
    click.echo(f"slipstream: the server at {server} is loading its model; waiting at most {seconds:g} s", err=True)
    answered = time.monotonic()
    until = answered + seconds
    while True:
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, until - time.monotonic())))
        left = until - time.monotonic()
        if left <= 0:
            break
        gone = f"the server at {server} went away while it was loading; its log says why"
        found = await _asked(client, min(ANSWER_SECONDS, left), gone)
        if found is _Answer.OTHER:
            return
        if found is _Answer.LOADING:
            answered = time.monotonic()
    raise click.ClickException(_given_up(server, seconds, until - answered))


def _given_up(server: str, seconds: float, silent: float) -> str:
    """What is told after `seconds`, in the last `silent` of which the server has not answered."""
    if silent < SILENT_SECONDS:
        return f"the server at {server} is still loading after {seconds:g} s; wait longer with --wait SECONDS"
    return (
        f"the server at {server} was loading and no longer answers: waited {seconds:g} s, the last {silent:.1f} s "
        "without an answer; its log may say why"
    )


_UNRESOLVED = "address lookup failed"
"""In what gRPC says of a name that is not known, or whose servers of DNS do not answer."""


async def _asked(client: SlipstreamClient, timeout: float, unreachable: str) -> _Answer:
    """What the server says within `timeout` seconds. Raises ClickException that begins with `unreachable`."""
    import grpc

    from service.client import CallFailed
    from service.pb.slipstream.v1 import inference_pb2 as pb

    try:
        state = (await client.server_info(timeout=timeout)).state
    except CallFailed as failure:
        # A server that refuses says its reason; without one no server has answered.
        if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
            if _UNRESOLVED in failure.message:
                raise click.ClickException(
                    f"--server: check the name, or give an address ({failure.message})"
                ) from None
            raise click.ClickException(f"{unreachable} ({failure.message})") from None
        is_silent = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason
        return _Answer.NONE if is_silent else _Answer.OTHER
    return _Answer.LOADING if state == pb.SERVER_STATE_STARTING else _Answer.OTHER
