"""Commands wait for a server that is still loading its model: with a line on stderr, for a bounded time.

They wait for nothing else, for example not for a server that does not answer.
"""

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
"""Seconds in which a server must report its state; it can do so while it loads as well."""

SILENT_SECONDS: Final = 1.0
"""Seconds without an answer, after which the last error does not call the server still loading."""


class _Answer(Enum):
    """LOADING: the server reports that it loads. NONE: no answer in time. OTHER: anything else, also an error, whose
    reason the command's own call then gets.
    """

    LOADING = auto()
    NONE = auto()
    OTHER = auto()


def wait_option(command: Command) -> Command:
    """Add `--wait`; the command takes it as `wait`, in seconds."""
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
    """Return once the server at `server` has loaded its model, or is in a state that waiting does not change.

    The first answer that it is loading is reported on stderr. Raises ClickException, exit status 1, with advice in
    three cases: (1) there is no server, or its first answer takes longer than ANSWER_SECONDS; (2) the server goes away
    while it loads; (3) after `seconds` it still loads, or has stopped answering.
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
    """The error text after `seconds`; in the last `silent` seconds of them the server has not answered."""
    if silent < SILENT_SECONDS:
        return f"the server at {server} is still loading after {seconds:g} s; wait longer with --wait SECONDS"
    return (
        f"the server at {server} was loading and no longer answers: waited {seconds:g} s, the last {silent:.1f} s "
        "without an answer; its log may say why"
    )


_UNRESOLVED = "address lookup failed"
"""In gRPC's error for a name that is not known, or for which DNS does not answer."""


_NO_HANDSHAKE = "Tls handshake failed"
"""In gRPC's error where a server answers and TLS cannot begin."""


async def _asked(client: SlipstreamClient, timeout: float, unreachable: str) -> _Answer:
    """The server's answer within `timeout` seconds. Raises ClickException with `unreachable` if no server is there."""
    import grpc

    from service.client import CallFailed

    try:
        return _Answer.LOADING if await client.is_loading(timeout) else _Answer.OTHER
    except CallFailed as failure:
        # A server that refuses sends its reason, so without a reason no server has answered.
        if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
            if _UNRESOLVED in failure.message:
                raise click.ClickException(
                    f"--server: check the name, or give an address ({failure.message})"
                ) from None
            if _NO_HANDSHAKE in failure.message:
                raise click.ClickException(
                    "--tls-ca, --tls-cert: the server and this client do not accept each other's certificates, or one "
                    f"of them uses no TLS ({failure.message})"
                ) from None
            raise click.ClickException(f"{unreachable} ({failure.message})") from None
        is_silent = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason
        return _Answer.NONE if is_silent else _Answer.OTHER
