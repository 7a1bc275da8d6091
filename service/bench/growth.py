"""`slipstream bench growth`: curves of throughput, host time, start-up and memory, and which of them bend upwards."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import click
import torch

from service.bench.curve import as_json, table
from service.bench.growth_axes import AXES
from service.process.switch_interval import shorten_switch_interval


@click.command()
@click.option("--axes", default=",".join(AXES), show_default=True, help="Which curves, with commas.")
@click.option(
    "--rounds", default=2, show_default=True, help="Rounds after the one that warms up; medians are reported."
)
@click.option("--quick", is_flag=True, help="Only the first sizes of each axis: to see that it works.")
@click.option("--json", "json_too", is_flag=True, help="Print one JSON object as the last line.")
def growth(axes: str, rounds: int, quick: bool, json_too: bool) -> None:
    """How throughput and host time grow with load, one axis at a time, as Markdown tables.

    Host time is processor time of all threads per decode step, on an emulated device that takes no time; "real model"
    computes a small Llama on one thread. Each row ends with the exponent fitted to its last points and the one it may
    have; what is above that bends upwards, and its reason is printed below the table.
    """
    names = axes.split(",")
    for name in names:
        if name not in AXES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(AXES)}", param_hint="--axes")
    shorten_switch_interval(writes=False)
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-growth-") as scratch:
        for name in names:
            axis, began = AXES[name], time.monotonic()
            sizes = axis.sizes[:3] if quick else axis.sizes
            curves = axis.measure(sizes, rounds, Path(scratch))
            click.echo(f"{name}: {time.monotonic() - began:.0f} s", err=True)
            click.echo(table(axis.title, axis.size, curves))
            found[name] = as_json(curves)
    if json_too:
        click.echo(json.dumps(found))
