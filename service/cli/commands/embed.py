"""`slipstream embed`: vectors of texts, printed as JSON, from a server or an engine in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import aclosing
from typing import Any

import click

from core.errors import SlipstreamError, StartupError
from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.commands.generate import ENGINE_GROUPS
from service.cli.commands.waiting import wait_option, wait_until_loaded
from service.cli.server_access import ServerAccess, access_options, server_option
from service.config.server_config import ServerConfig
from service.config.sources import load

POOLINGS = ("last", "mean", "cls")


@click.command(cls=GroupedCommand)
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@server_option("Ask this server instead of loading a model here.")
@wait_option
@access_options
@click.option("--adapter", metavar="NAME", help="With --server: use this LoRA adapter of the server.")
@click.option(
    "--pooling",
    type=click.Choice(POOLINGS),
    default="last",
    show_default=True,
    help="Which hidden states make the vector: the last token's, the mean of all, or the first token's.",
)
@click.option(
    "--normalize/--no-normalize",
    default=True,
    show_default=True,
    help="Scale to length 1, so a dot product is a cosine.",
)
@click.option("--dimensions", type=int, help="Keep only the first entries (Matryoshka).  [default: all]")
@click.option("--json", "whole", is_flag=True, help="Print one object with the token counts instead.")
@setting_options(ENGINE_GROUPS, without=("seed", "adapter", "max_lora_rank", "lora_dir"))
def embed(
    texts: tuple[str, ...],
    server: str | None,
    wait: float,
    adapter: str | None,
    pooling: str,
    normalize: bool,
    dimensions: int | None,
    whole: bool,
    config_file: str | None,
    **options: Any,
) -> None:
    """Print the vector of each TEXT, one JSON array a line, in their order. A single - reads texts from standard
    input, one a line.

    \b
    slipstream embed "the quick brown fox"
    slipstream embed --server 127.0.0.1:50051 --pooling mean "a fox" "a dog"
    slipstream embed --server 127.0.0.1:50051 --json - < texts.txt
    """
    given = _lines() if texts == ("-",) else texts
    access = ServerAccess.taken_from(options)
    asked: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
    if dimensions is not None:
        asked["dimensions"] = dimensions
    if adapter and not server:
        raise click.UsageError("--adapter needs --server")
    if server:
        asked["adapter"] = adapter or ""
        found = _remote(server, wait, access, given, asked)
    else:
        found = _local(load(ServerConfig, options, os.environ, config_file), given, asked)
    try:
        _print(asyncio.run(found), whole)
    except StartupError:
        raise
    except SlipstreamError as error:
        raise click.ClickException(error.message) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _lines() -> tuple[str, ...]:
    lines = tuple(line.rstrip("\r\n") for line in sys.stdin)
    if not lines:
        raise click.UsageError("standard input holds no text")
    return lines


def _print(vectors: list[dict[str, Any]], whole: bool) -> None:
    if whole:
        click.echo(json.dumps({"dimension": len(vectors[0]["values"]), "embeddings": vectors}))
        return
    for vector in vectors:
        click.echo(json.dumps(vector["values"]))


async def _remote(
    server: str, wait: float, access: ServerAccess, texts: tuple[str, ...], asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """The vectors of the texts, from a server. Raises StartupError for a token or TLS file that cannot be used."""
    from dataclasses import asdict

    from service.client import CallFailed

    async with access.client(server) as client:
        await wait_until_loaded(client, server, wait)
        try:
            return [asdict(vector) for vector in await client.embed(*texts, **asked)]
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None


async def _local(config: ServerConfig, texts: tuple[str, ...], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The vectors of the texts, from an engine in this process that lives as long as this call."""
    from core.types.io import EmbedRequest, Pooling
    from service.cli.commands.local import local_engine

    async with local_engine(config) as engine:
        request = EmbedRequest(texts, "terminal", **{**asked, "pooling": Pooling(asked["pooling"])})
        async with aclosing(await engine.embed(request)) as call:
            result = await call.result()
    return [
        {
            "values": each.values.tolist(),
            "prompt_tokens": each.prompt_tokens,
            "cached_tokens": each.cached_tokens,
        }
        for each in result.embeddings
    ]
