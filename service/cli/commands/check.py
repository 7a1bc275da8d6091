"""`slipstream check`: how a model would be served here, or why it would be refused, without serving it."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from core.errors import StartupError
from service.checkpoints.fetching import fetched
from service.checkpoints.files import check_model
from service.checkpoints.model_name import hub_model
from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.progress import TerminalProgress
from service.config.server_config import ServerConfig
from service.config.sources import load
from service.engine.builder import in_daemon_thread
from service.process.compile_caches import use_writable_caches
from service.process.sizes import shown

if TYPE_CHECKING:
    from core.engine.report import ModelReport

GROUPS = ("Model", "Device", "Memory", "Scheduling")


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="DIR|ORG/NAME", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@setting_options(GROUPS, without=("model",))
def check(model: str | None, as_json: bool, config_file: str | None, **options: Any) -> None:
    """Say how a model would be served on this machine, or why it would be refused.

    It is loaded and proved as `serve` does it, and its pools are sized; nothing is served. Without a model it is the
    bundled one. Exit code 3: it cannot be served, for the reason that is printed, with --json as {"refused": reason}.

    \b
    slipstream check
    slipstream check DIR --quantization int8
    slipstream check ORG/NAME --dtype bfloat16 --json
    """
    config = load(ServerConfig, options | {"model": model}, os.environ, config_file)
    try:
        if hub_model(config.engine.model.path) is None:
            check_model(config.model_path)
        use_writable_caches(os.environ)
        found = asyncio.run(_reported(config))
    except StartupError as error:
        if as_json:
            click.echo(json.dumps({"refused": error.message}))
        raise
    if as_json:
        click.echo(json.dumps(asdict(found) | {"tokens_per_second": found.tokens_per_second}))
        return
    for name, value in _lines(found):
        click.echo(f"{name:<22} {value}")


async def _reported(config: ServerConfig) -> ModelReport:
    """The report; loading shows its progress. Raises StartupError."""
    from core.engine.report import report

    progress = TerminalProgress()
    try:
        return await in_daemon_thread(lambda: report(fetched(config.engine_config(), progress), progress))
    except StartupError as error:
        if str(config.model_path) in error.message:
            raise
        # An error of the same kind, so that the exit code is the same.
        raise type(error)(f"{config.model_path}: {error.message}") from None
    finally:
        progress.close()


def _lines(found: ModelReport) -> list[tuple[str, str]]:
    """What a person reads, line by line."""
    weights = f"{shown(found.weight_bytes)} in {found.quantization or found.dtype}"
    if found.read_bytes < 0.95 * found.weight_bytes:
        weights += f", of which a token reads {shown(found.read_bytes)}"
    lines = [
        ("model", f"{found.name} ({found.architecture})"),
        ("served by", f"{found.served_by}, on {found.device}"),
        ("weights", weights),
        ("context", f"{found.context_length:,} tokens"),
    ]
    if found.labels:
        lines.append(("labels", ", ".join(found.labels)))
    if not found.generates:
        lines.append(("puts out", "no text: it embeds" + (", and judges texts and pairs" if found.labels else "")))
    if found.kv_bytes_per_token or found.state_bytes:
        lines += _held(found)
    return [*lines, *(("remark", each) for each in found.remarks)]


def _held(found: ModelReport) -> list[tuple[str, str]]:
    """What requests hold, and how fast one of them can go on."""
    held = f"{found.tokens:,} tokens" + (f" ({found.tokens / found.context_length:.1f} whole contexts)")
    lines = [("cache per token", shown(found.kv_bytes_per_token))]
    if found.state_bytes:
        lines.append(("states per request", shown(found.state_bytes)))
    lines.append(("cache here", held))
    if found.generates:
        most = f"at most {found.tokens_per_second:,.0f} for one request: {shown(found.bandwidth)}/s were read just now"
        lines.append(("tokens per second", most))
    return lines
