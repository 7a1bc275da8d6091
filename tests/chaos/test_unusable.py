"""What only loading can notice: still one line and an exit code, and the port never said that it was ready."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.models.bundled import bundled_model_dir
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard

Spoil = Callable[[Path], tuple[str, ...]]


def no_gpu(folder: Path) -> tuple[str, ...]:
    return ("--device", "cuda")


def no_tokenizer(folder: Path) -> tuple[str, ...]:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return ()


def unknown_architecture(folder: Path) -> tuple[str, ...]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Nonesuch"], "model_type": "nonesuch"}))
    return ()


def wrong_shape(folder: Path) -> tuple[str, ...]:
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    save_file(weights | {name: weights[name][:-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})
    return ()


def missing_tensor(folder: Path) -> tuple[str, ...]:
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in sorted(weights) if "layers.0" in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return ()


def integer_weights(folder: Path) -> tuple[str, ...]:
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    save_file(weights | {name: weights[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    return ()


Cases = tuple[tuple[Spoil, int], ...]

FEW: Cases = ((no_gpu, 2), (no_tokenizer, 3), (wrong_shape, 3))
MORE: Cases = ((unknown_architecture, 3), (missing_tensor, 3), (integer_weights, 3))
"""The loader's own tests have these too; here they cost a process each."""


async def _serve(folder: Path, *args: str) -> tuple[int, str, str, float]:
    """Exit code, standard output and error, and seconds."""
    before = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "serve", "--model", str(folder), "--port=0", "--metrics-port=0"),
        *("--log-level", "error", *args),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode(), time.monotonic() - before


@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the cases is the absence of a GPU")
@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.soak)], ids=["few", "more"])
async def test_what_cannot_be_loaded_is_one_line_and_an_exit_code(
    tmp_path: Path, cases: Cases, scorecard: Scorecard
) -> None:
    """All at once: each is a process that mostly imports."""
    folders = [Path(shutil.copytree(bundled_model_dir(), tmp_path / spoil.__name__)) for spoil, _ in cases]
    runs = [_serve(folder, *spoil(folder)) for folder, (spoil, _) in zip(folders, cases)]
    results = await asyncio.gather(*runs)
    wrong = {}
    for (spoil, due), (code, out, err, seconds) in zip(cases, results):
        lines = [line for line in err.splitlines() if line.startswith("slipstream: ")]
        fine = code == due and not out and len(lines) == 1 and "Traceback" not in err
        if not fine or re.search(r"0x[0-9a-f]{6,}", err):
            wrong[spoil.__name__] = (code, out, err)
        scorecard(22, f"{spoil.__name__.replace('_', ' ')}: exit code", code, equals=due)
        scorecard(22, f"{spoil.__name__.replace('_', ' ')}: seconds to the exit, beside others", seconds)
    assert not wrong
