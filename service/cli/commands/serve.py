"""`slipstream serve`: read the settings, refuse what cannot start, run until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from core.errors import StartupError
from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.progress import TerminalProgress
from service.config.server_config import ServerConfig
from service.config.sources import load
from service.config.torchrun import launched
from service.engine.builder import left_behind
from service.process.compile_caches import use_writable_caches
from service.process.exit_guard import leave_within
from service.process.logs import configure
from service.process.switch_interval import shorten_switch_interval
from service.server.startup_checks import check

if TYPE_CHECKING:
    from service.cli.lifecycle import Served

_EPILOG = """\b
Every setting can also be given in the environment or in the YAML file; a flag wins over the environment, the
environment over the file. Ctrl-C or SIGTERM drains: running streams finish, then the process exits with 0. A second
signal ends it at once. Exit codes: 0 drained, 1 the engine failed, 2 settings or ports, 3 the checkpoint or an adapter.
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@setting_options()
def serve(config_file: str | None, **flags: Any) -> None:
    """Serve a checkpoint over gRPC, and metrics over HTTP.

    Without --model it serves the bundled model; --model ORG/NAME fetches one from the Hugging Face hub. The API is
    protos/slipstream/v1/*.proto; health checks answer on the same port, with liveness as service "" and readiness as
    "slipstream.v1.InferenceService".

    On several machines (--nnodes, or torchrun) it is started on each; the first one serves, the others only compute.
    """
    config = load(ServerConfig, flags, os.environ, config_file)
    config = replace(config, engine=launched(config.engine, os.environ))
    # Before grpc is imported: a server that cannot start then ends within a few hundred milliseconds.
    check(config)
    configure(config.log_level)
    use_writable_caches(os.environ)
    shorten_switch_interval(writes=not config.frontends)
    code = _follow(config) if config.engine.nodes.node_rank else asyncio.run(_until_told(config))
    if code or left_behind():
        # A forward thread that hangs, a half-read checkpoint or a download must not keep an ended process alive: the
        # interpreter would wait for their threads.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _follow(config: ServerConfig) -> int:
    from service.cli.follower import follow

    return follow(config.engine_config())


async def _until_told(config: ServerConfig) -> int:
    """Run the server. Returns its exit code. The process then has EXIT_SECONDS to end, also after a StartupError."""
    try:
        code = await _run(config)
    except StartupError as error:
        leave_within(error.exit_code)
        raise
    leave_within(code)
    return code


async def _run(config: ServerConfig) -> int:
    from service.checkpoints.fetching import fetching
    from service.cli.lifecycle import run
    from service.engine.builder import build_core_engine
    from service.frontends.group import FrontEndGroup
    from service.replicas.builder import replicated
    from service.server.server import Server

    make = FrontEndGroup if config.frontends else Server
    progress = TerminalProgress()
    build = replicated(config) if config.data_parallel > 1 else build_core_engine
    server: Served = make(config, fetching(build), progress)

    def announce(ready: Served) -> None:
        progress.close()
        # A pipe that is not read and already full would hold the event loop for ever.
        line = f"{ready_line(ready)}\n".encode()
        threading.Thread(target=os.write, args=(sys.stdout.fileno(), line), daemon=True).start()

    try:
        return await run(server, announce)
    finally:
        # An error is a line of its own, and not the end of a bar.
        progress.close()


def ready_line(server: Served) -> str:
    """The line that is printed once the server takes requests."""
    config = server.config
    return (
        f"slipstream: serving {server.engine.model_info.name} on {config.host}:{server.port}, "
        f"metrics on http://{config.metrics_host}:{server.metrics_port}/metrics (Ctrl-C drains)"
    )
