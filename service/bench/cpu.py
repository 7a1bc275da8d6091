"""`slipstream bench cpu`: this engine and `transformers` on the CPU, the same work in turns, a fresh process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from core.model_config import QUANTIZATIONS
from service.bench.contenders import CONTENDERS
from service.bench.families import Plan, as_json, measure_families
from service.bench.family_shapes import FAMILY_SHAPES
from service.bench.workloads import NAMES, Measured, measure, workload

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, object]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    "small": {
        "model_type": "qwen2",
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
"""Models of 24 and 390 million parameters. Their weights are random, which costs the same as trained ones."""
WEIGHT_BYTES = {"int8": 1.0, "int4": 0.5 + 3 / 128}
"""Of weights that are quantised at load; int4 with a scale of two bytes and a zero of one for each 128."""
READ_BYTES, READS = 1 << 30, 5
"""Bytes of one sum that measures the read bandwidth, and how many sums are tried."""


@click.command()
@click.option("--models", default="", help=f"Of {', '.join(MODELS)}, or of the families; with commas.  [default: tiny]")
@click.option("--families", is_flag=True, help="One model of each family instead, or of those that --models names.")
@click.option("--workloads", "loads", default=",".join(NAMES), show_default=True, help="Which, with commas.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of all; medians are reported.")
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Of the weights: bfloat16 or float32; families take both."
)
@click.option(
    "--quantization",
    type=click.Choice(QUANTIZATIONS),
    default="none",
    show_default=True,
    help="Of the weights at load.",
)
@click.option("--threads", default=os.cpu_count() or 1, show_default=True, help="Of each engine.")
@click.option("--peer-python", default="python3", show_default=True, help="An interpreter with vLLM, for families.")
@click.option("--json", "json_too", is_flag=True, help="Print one JSON object as the last line.")
def cpu(
    models: str,
    families: bool,
    loads: str,
    rounds: int,
    dtype: str,
    quantization: str,
    threads: int,
    peer_python: str,
    json_too: bool,
) -> None:
    """Output tokens per second on the CPU beside `transformers`, four workloads, as Markdown.

    W1: 64 mixed requests at once; W2: one at a time; W3: 32 behind a shared prefix of 512 tokens; W3w: the same, prefix
    served before. The share of the roofline is what W2 reads of weights per second, by what `torch.sum` reads.

    With --families a model of each family that the documents call served; vLLM beside them where it is installed.
    """
    if families:
        names = models.split(",") if models else list(FAMILY_SHAPES)
        rows = measure_families(Plan(names, loads.split(","), dtype.split(","), rounds, threads, peer_python))
        if json_too:
            click.echo(as_json(rows))
        return
    found = {}
    for name in (models or "tiny").split(","):
        if name not in MODELS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(MODELS)}", param_hint="--models")
        with tempfile.TemporaryDirectory(prefix="slipstream-cpu-") as directory:
            _say(f"{name}: making a checkpoint")
            size = _make(name, directory, dtype, quantization)
            task = {"loads": loads.split(","), "dtype": dtype, "quantization": quantization, "threads": threads}
            results = list(_rounds(name, directory, rounds, task))
        medians = _medians(results)
        read = _read_bandwidth(threads)
        click.echo(_table(name, loads.split(","), medians, size, read))
        found[name] = {"read_bytes_per_second": read, "weight_bytes": size, "medians": medians}
    if json_too:
        click.echo(json.dumps(found))


def _make(name: str, directory: str, dtype: str, quantization: str) -> int:
    """Write a checkpoint. Returns the bytes of weights that a decode step reads, quantised or not.

    These are all weights but the embedding.
    """
    from service.bench.random_checkpoint import save_random_checkpoint

    module = save_random_checkpoint(MODELS[name], getattr(torch, dtype), Path(directory))
    matrices = [each.weight for each in module.modules() if isinstance(each, torch.nn.Linear)]
    read = {id(each): int(each.numel() * WEIGHT_BYTES.get(quantization, each.itemsize)) for each in matrices}
    embedding = id(module.get_input_embeddings().weight)
    rest = sum(each.nbytes for each in module.parameters() if id(each) not in read and id(each) != embedding)
    return sum(read.values()) + rest


Result = tuple[str, str, Measured]


def _rounds(model: str, directory: str, rounds: int, task: dict[str, Any]) -> Iterator[Result]:
    """(contender, workload, figures) of all rounds. Raises ClickException with the output of a process that failed."""
    for number in range(1, rounds + 1):
        for contender in CONTENDERS:
            _say(f"{model}: round {number} of {rounds}, {contender}")
            mine = json.dumps(task | {"contender": contender, "round": number})
            command = (sys.executable, "-P", "-m", "service.bench.cpu", directory, mine)
            env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(task["threads"])}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise click.ClickException(f"{contender} failed:\n{done.stderr[-2000:]}")
            for load, figures in json.loads(done.stdout.splitlines()[-1]).items():
                yield contender, load, Measured(**figures)


def _medians(results: list[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """By contender and workload: the median over rounds of each field of `Measured`."""
    by_place: dict[tuple[str, str], list[Measured]] = {}
    for contender, load, found in results:
        by_place.setdefault((contender, load), []).append(found)
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for (contender, load), places in by_place.items():
        every = [asdict(each) for each in places]
        medians.setdefault(contender, {})[load] = {key: median(each[key] for each in every) for key in every[0]}
    return medians


def _table(
    model: str, loads: list[str], medians: dict[str, dict[str, dict[str, float]]], size: int, read: float
) -> str:
    lines = [f"| {model}, output tokens/s | {' | '.join(loads)} |", "|---" * (len(loads) + 1) + "|"]
    for contender, found in medians.items():
        rates = [found[load]["rate"] for load in loads]
        lines.append(f"| {contender} | {' | '.join(f'{rate:,.1f}' for rate in rates)} |")
    if "W2" in loads:
        rate = medians["slipstream"]["W2"]["rate"]
        lines.append("")
        lines.append(
            f"W2: {rate * size / 1e9:.1f} GB/s of weights read, {rate * size / read:.0%} of the {read / 1e9:.1f} GB/s "
            f"that torch.sum reads; {medians['slipstream']['W2']['itl'] * 1e3:.2f} ms between tokens"
        )
    return "\n".join(lines) + "\n"


def _read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read: the best of a few sums over more memory than any cache holds."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data, best = torch.ones(READ_BYTES // 4), 0.0
    for _ in range(READS):
        began = time.perf_counter()
        data.sum()
        best = max(best, READ_BYTES / (time.perf_counter() - began))
    torch.set_num_threads(before)
    return best


def _say(line: str) -> None:
    click.echo(line, err=True)


def run_here(directory: str, task: str) -> None:
    """Run one contender through its workloads in this process, and print the figures as one JSON object.

    `task` is a JSON object: contender, loads, dtype, quantization, threads, and the number of the round.
    """
    what = json.loads(task)
    vocab = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    contender = CONTENDERS[what["contender"]](directory, what["dtype"], what["quantization"], what["threads"])
    # A round that is not measured, with its own ids: first calls compile, fill caches and touch memory.
    measure(contender, workload("W3", vocab, 0))
    found = {load: asdict(measure(contender, workload(load, vocab, what["round"]))) for load in what["loads"]}
    contender.close()
    print(json.dumps(found))


if __name__ == "__main__":
    run_here(*sys.argv[1:])
