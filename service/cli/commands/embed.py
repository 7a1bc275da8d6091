"""`slipstream embed`: vectors of texts, printed as JSON, from a server or an engine in this process."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import click

from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.commands.asking import COUNT, WITHOUT, Where, answer, lines_of, of_server
from service.cli.commands.generate import ENGINE_GROUPS
from service.cli.commands.judging import truncate_option
from service.cli.commands.waiting import wait_option
from service.cli.server_access import access_options, server_option
from service.config.server_config import ServerConfig

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
    help="Which hidden states make the vector: the last token's, the mean of all, or the first token's.  [default: as "
    "the model was trained]",
)
@click.option(
    "--normalize/--no-normalize",
    default=True,
    show_default=True,
    help="Scale to length 1, so a dot product is a cosine.",
)
@truncate_option
@click.option("--dimensions", type=COUNT, help="Keep only the first entries (Matryoshka).  [default: all]")
@click.option("--json", "whole", is_flag=True, help="Print one object with the token counts instead.")
@setting_options(ENGINE_GROUPS, without=WITHOUT)
def embed(
    texts: tuple[str, ...],
    server: str | None,
    wait: float,
    adapter: str | None,
    pooling: str | None,
    normalize: bool,
    truncate: bool,
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
    where = Where.told(server, wait, adapter, config_file, options)
    given = lines_of(texts)
    asked: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "truncate": truncate}
    if dimensions is not None:
        asked["dimensions"] = dimensions
    _print(answer(_remote(where, given, asked) if server else _local(where.config(), given, asked)), whole)


def _print(vectors: list[dict[str, Any]], whole: bool) -> None:
    if whole:
        click.echo(json.dumps({"dimension": len(vectors[0]["values"]), "embeddings": vectors}))
        return
    for vector in vectors:
        click.echo(json.dumps(vector["values"]))


async def _remote(where: Where, texts: tuple[str, ...], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The vectors of the texts, from a server. Raises StartupError for a token or TLS file that cannot be used."""
    adapter = where.adapter or ""
    vectors = await of_server(where, lambda client: client.embed(*texts, adapter=adapter, **asked))
    return [asdict(vector) for vector in vectors]


async def _local(config: ServerConfig, texts: tuple[str, ...], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The vectors of the texts, from an engine in this process that lives as long as this call."""
    from core.types.io import EmbedRequest, Pooling
    from service.cli.commands.local import local_engine

    async with local_engine(config) as engine:
        pooling = Pooling(asked["pooling"]) if asked["pooling"] else engine.model_info.pooling
        request = EmbedRequest(texts, "terminal", **{**asked, "pooling": pooling})
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
