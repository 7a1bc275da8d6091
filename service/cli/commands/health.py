"""`slipstream health`: ask a server whether it is ready, or alive; the exit code is the answer."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from service.cli.seconds import Seconds
from service.cli.server_access import DEFAULT_SERVER, ServerAccess, access_options, server_option

DEFAULT_SECONDS = 5.0


@click.command()
@server_option("Ask it.", DEFAULT_SERVER)
@click.option("--live", is_flag=True, help="Ask whether it is alive, not whether it is ready.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Seconds(0),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="Seconds to wait for the answer.",
)
@access_options
def health(server: str, live: bool, timeout: float, **options: Any) -> None:
    """Say whether a server is ready for requests. Exit codes: 0 it is, 1 it is not or did not answer."""
    answer = asyncio.run(_ask(server, ServerAccess.taken_from(options), live, timeout))
    click.echo(answer)
    sys.exit(answer != "SERVING")


async def _ask(server: str, access: ServerAccess, live: bool, timeout: float) -> str:
    """The name of the serving status, or of the gRPC status code if the call failed."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from service.servicers.health import LIVENESS, READINESS

    request = health_pb2.HealthCheckRequest(service=LIVENESS if live else READINESS)
    async with access.client(server) as client:
        try:
            found = await health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(found.status))
