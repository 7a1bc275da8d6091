"""`slipstream score`: documents by how well they answer a query, from a server or an engine in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from core.errors import InvalidRequest
from service.cli.cli_options import GroupedCommand
from service.cli.commands.asking import COUNT, Where, answer, lines_of, of_server, one_line
from service.cli.commands.judging import judging_options, of_engine

if TYPE_CHECKING:
    from service.client import DocumentScore


@click.command(cls=GroupedCommand)
@click.argument("query")
@click.argument("documents", nargs=-1, required=True, metavar="DOCUMENT...")
@click.option("--top-n", type=COUNT, metavar="N", help="Only the best so many.  [default: all]")
@judging_options
def score(
    query: str,
    documents: tuple[str, ...],
    top_n: int | None,
    server: str | None,
    wait: float,
    adapter: str | None,
    truncate: bool,
    raw_scores: bool,
    whole: bool,
    config_file: str | None,
    **options: Any,
) -> None:
    """Print each DOCUMENT with its rank and its score, by how well it answers QUERY, best first. A single - reads
    documents from standard input, one a line. With --json they stay in their order, unless there is a --top-n.

    The model is a reranker: one whose head has a single label, or that answers with tokens that --label-tokens names.

    \b
    slipstream score --model DIR "what eats hens" "The fox is a predator." "Hens lay eggs."
    slipstream score --server 127.0.0.1:50051 --top-n 3 "what eats hens" - < documents.txt
    slipstream score --server 127.0.0.1:50051 --json "what eats hens" "The fox is a predator."
    """
    where = Where.told(server, wait, adapter, config_file, options)
    given = lines_of(documents)
    found = answer(_found(where, query, given, {"top_n": top_n, "raw_scores": raw_scores, "truncate": truncate}))
    if whole:
        click.echo(json.dumps({"results": [asdict(each) for each in found]}))
        return
    ranks = len(str(len(found)))
    for rank, each in enumerate(sorted(found, key=lambda each: -each.score), 1):
        click.echo(f"{rank:>{ranks}}  {each.score:.4f}  {one_line(given[each.index])}")


async def _found(where: Where, query: str, documents: tuple[str, ...], asked: dict[str, Any]) -> list[DocumentScore]:
    from service.client.judging import document_scores, score_request
    from service.wire import judge

    if where.server:
        adapter = where.adapter or ""
        return await of_server(where, lambda client: client.score(query, documents, adapter=adapter, **asked))
    message = score_request(query, documents, **asked)
    try:
        return document_scores(await of_engine(where, message, judge.score_request, judge.score_response))
    except InvalidRequest as error:
        raise judge.of_documents(error) from None
