"""`slipstream bench scheduler`: what the loop costs per step and request, and what a prompt costs to admit."""

from __future__ import annotations

import json
import statistics

import click

from service.bench.admission_cost import admission_seconds, insert_seconds, match_seconds, match_seconds_in_tree
from service.bench.curve import Curve, as_json, table
from service.bench.loop_step import PARTS, LoopStep, StepParts
from service.bench.scheduler_cost import PAGE_SIZE, scheduler_cost
from service.process.switch_interval import shorten_switch_interval

STEPS = 48
"""Steps of a round: three pages of tokens, so that a round has as many page allocations per step as the long run."""

CACHES = "what belongs to so many requests (streams, lists, detokenisers) no longer fits the processor's own caches"
MEMORY = "it is one comparison or copy of bytes, and at these lengths the bytes come from memory"
NODES = "the nodes of so long a path no longer fit the processor's own caches"


def loop_curves(sizes: list[int], rounds: int) -> list[Curve]:
    """Microseconds per step by part and all together, medians of interleaved rounds; objects per request and step."""
    alone = Curve("scheduler alone, no streams", "µs/step", 1.0, CACHES)
    whole = Curve("whole step, streams attached", "µs/step", 1.0, CACHES)
    parts = {part: Curve(f"- {part}", "µs/step", 1.0, CACHES) for part in PARTS}
    text = Curve("- read as text", "µs/step", 1.0, CACHES)
    alive, stays = Curve("new objects at the hand-over", "per request", 0.0), Curve("objects left", "per request", 0.0)
    for size in sizes:
        click.echo(f"{size} running ...", err=True)
        seen = _rounds(size, rounds, text=False)
        alone.points[size] = statistics.median(scheduler_cost(size, 2 * STEPS) for _ in range(rounds)) * 1e6
        whole.points[size] = statistics.median(each.step for each in seen) * 1e6
        for part, curve in parts.items():
            curve.points[size] = statistics.median(each.seconds[part] for each in seen) * 1e6
        text.points[size] = statistics.median(each.seconds["read"] for each in _rounds(size, rounds, text=True)) * 1e6
        alive.points[size], left = LoopStep(size, 3 * STEPS).churn(STEPS)
        stays.points[size] = max(left, 1e-6)
    each = [Curve(f"{c.name}, each", "µs/step/request", 0.0, CACHES, _per_request(c)) for c in (alone, whole)]
    return [alone, whole, *each, *parts.values(), text, alive, stays]


def _rounds(size: int, rounds: int, *, text: bool) -> list[StepParts]:
    step = LoopStep(size, rounds * STEPS, text=text)
    return [step.measure(STEPS) for _ in range(rounds)]


def _per_request(curve: Curve) -> dict[int, float]:
    return {size: cost / size for size, cost in curve.points.items()}


def prompt_curves(tokens: list[int]) -> list[Curve]:
    """Microseconds to match, insert and admit a prompt, by its tokens."""
    match = Curve("match, one edge", "µs", 1.0, MEMORY)
    deep = Curve("match, an edge per page", "µs", 1.0, NODES)
    insert = Curve("insert", "µs", 1.0, MEMORY)
    fresh = Curve("step that admits it, nothing cached", "µs", 1.0, MEMORY)
    known = Curve("step that admits it, all but a page cached", "µs", 1.0, MEMORY)
    for count in tokens:
        click.echo(f"prompt of {count} tokens ...", err=True)
        pages = count // PAGE_SIZE
        match.points[count] = match_seconds(pages) * 1e6
        deep.points[count] = match_seconds(pages, edges=pages) * 1e6
        insert.points[count] = insert_seconds(pages) * 1e6
        fresh.points[count] = admission_seconds(pages) * 1e6
        known.points[count] = admission_seconds(pages, cached=True) * 1e6
    return [match, deep, insert, fresh, known]


def tree_curves(nodes: list[int]) -> list[Curve]:
    """Microseconds to match 64 pages, by the number of prompts in the tree."""
    curve = Curve("match of 64 pages", "µs", 0.0, NODES)
    for count in nodes:
        click.echo(f"tree of {count} prompts ...", err=True)
        curve.points[count] = match_seconds_in_tree(count) * 1e6
    return [curve]


@click.command()
@click.option("--running", default="1,64,256,1024,2048,4096", show_default=True, help="Running requests, with commas.")
@click.option("--prompts", default="1024,4096,16384,65536,131072", show_default=True, help="Prompt lengths in tokens.")
@click.option("--trees", default="64,256,1024,4096", show_default=True, help="Prompts in the radix tree.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_too", is_flag=True, help="Print one JSON object as the last line.")
def scheduler(running: str, prompts: str, trees: str, rounds: int, json_too: bool) -> None:
    """What the loop costs per step and running request in steady decode, and what a prompt costs to match and admit.

    "scheduler alone" drops its outputs. The whole step has a stream per request and is given by parts: take results and
    stop checks, plan and build the batch, submit, publish statistics, hand tokens over to the streams. Reading is the
    client side's part and comes beside it, as ids and as text. No device, no gRPC.
    """
    shorten_switch_interval(writes=False)
    sizes, lengths, nodes = ([int(each) for each in text.split(",")] for text in (running, prompts, trees))
    found = {
        ("Steady decode", "running requests"): loop_curves(sizes, rounds),
        ("Prompts", "prompt tokens"): prompt_curves(lengths),
        ("Size of the radix tree", "prompts in it"): tree_curves(nodes),
    }
    for (title, size), curves in found.items():
        click.echo(f"\n{table(title, size, curves)}")
    if json_too:
        click.echo(json.dumps({title: as_json(curves) for (title, _), curves in found.items()}))
