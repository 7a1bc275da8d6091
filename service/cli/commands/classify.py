"""`slipstream classify`: how well the labels of a model fit texts, from a server or an engine in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from service.cli.cli_options import GroupedCommand
from service.cli.commands.asking import Where, answer, lines_of, of_server, one_line
from service.cli.commands.judging import judging_options, of_engine

if TYPE_CHECKING:
    from service.client import Classification
    from service.client.judging import Judged


@click.command(cls=GroupedCommand)
@click.argument("texts", nargs=-1, metavar="[TEXT...]")
@click.option(
    "--pair",
    "pairs",
    nargs=2,
    multiple=True,
    metavar="FIRST SECOND",
    help="Judge these two texts together; may be given several times.",
)
@judging_options
def classify(
    texts: tuple[str, ...],
    pairs: tuple[tuple[str, str], ...],
    server: str | None,
    wait: float,
    adapter: str | None,
    truncate: bool,
    raw_scores: bool,
    whole: bool,
    config_file: str | None,
    **options: Any,
) -> None:
    """Print how well each label of the model fits each TEXT, best first. A single - reads texts from standard input,
    one a line.

    The model has a classification head, or answers with tokens that --label-tokens names.

    \b
    slipstream classify --model DIR "What a lovely day"
    slipstream classify --server 127.0.0.1:50051 "a fox" "a dog"
    slipstream classify --server 127.0.0.1:50051 --pair "It rains." "The street is wet."
    slipstream classify --server 127.0.0.1:50051 --json - < texts.txt
    """
    where = Where.told(server, wait, adapter, config_file, options)
    inputs: tuple[Judged, ...] = (*lines_of(texts), *pairs)
    if not inputs:
        raise click.UsageError("give a TEXT or a --pair")
    found = answer(_found(where, inputs, {"raw_scores": raw_scores, "truncate": truncate}))
    if whole:
        click.echo(json.dumps({"results": [asdict(each) for each in found]}))
    else:
        click.echo("\n\n".join(_shown(each, given, len(inputs) > 1) for each, given in zip(found, inputs, strict=True)))


async def _found(where: Where, inputs: tuple[Judged, ...], asked: dict[str, Any]) -> list[Classification]:
    from service.client.judging import classifications, classify_request
    from service.wire import judge

    if where.server:
        adapter = where.adapter or ""
        return await of_server(where, lambda client: client.classify(*inputs, adapter=adapter, **asked))
    message = classify_request(inputs, **asked)
    return classifications(await of_engine(where, message, judge.classify_request, judge.classify_response))


def _shown(found: Classification, given: Judged, named: bool) -> str:
    """A line for each label, best first; below the text where there are several."""
    best = sorted(found.scores, key=lambda each: -each.score)
    width = max(len(each.label) for each in best)
    lines = [f"{each.label:<{width}}  {each.score:.4f}" for each in best]
    if named:
        texts = (given,) if isinstance(given, str) else map(str, given)
        lines = [" | ".join(map(one_line, texts)), *(f"  {line}" for line in lines)]
    return "\n".join(lines)
