"""Native decoders where their blocks, panels and tiles do not come out even, and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from tests.support.fakes.paged_steps import Part
from tests.support.tiles import same_bits
from tests.unit.core.models.reference import PackedRun, PlainModel

pytestmark = pytest.mark.usefixtures("native_code")

CPU = torch.device("cpu")
LONG, OTHER, ROWS = 210, 205, 40
"""Tokens of rows 1 and 2, past three blocks of keys; rows of the widest decode step, past two tiles."""
SHAPES: dict[str, dict[str, Any]] = {
    "five quarters of a panel to a head": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "intermediate_size": 100,
    },
    "two panels to a head": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    "seven heads to a KV head": {
        "hidden_size": 63,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 40,
    },
    "heads of eight": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
}
TOLERANCE = [("float32", 1e-4), ("bfloat16", 0.1)]
"""Of the largest logit. torchao rounds to bfloat16 between its product and the scale, native code once, behind both;
and weights of four bits are rounded to bfloat16 where they are widened."""


def sequences() -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = {1: LONG, 2: OTHER} | {row: 3 + row % 7 for row in range(3, ROWS + 1)}
    return {row: torch.randint(10, 120, (n,), generator=generator).tolist() for row, n in lengths.items()}


def steps(rows: dict[int, list[int]]) -> list[tuple[list[Part], int]]:
    """Prompts together; a chunk behind a long prefix beside a decode row; all rows decode; two rows decode."""
    short = [Part(row, 0, len(rows[row]) - 1) for row in range(3, ROWS + 1)]
    everyone = [
        Part(1, LONG - 2, 1),
        Part(2, OTHER - 2, 1),
        *(Part(r, len(rows[r]) - 1, 1) for r in range(3, ROWS + 1)),
    ]
    return [
        ([Part(1, 0, LONG - 3), Part(2, 0, 70), *short], ROWS),
        ([Part(2, 70, OTHER - 72), Part(1, LONG - 3, 1)], 1),
        (everyone, 0),
        ([Part(1, LONG - 1, 1), Part(2, OTHER - 1, 1)], 0),
    ]


def logits(
    path: Path, threads: int, dtype: str = "float32", quantization: str = "none", native: str = "wait", **more: Any
) -> list[torch.Tensor]:
    """By step, of the last token of every part; native code, unless it is off, with so many threads."""
    config = ModelConfig(str(path), dtype=dtype, native=native, quantization=quantization, **more)
    # Of torch's own threads there stays one: beside other tests it would wait 3 ms for the second in each product.
    with patch("torch.get_num_threads", return_value=threads):
        model = load_model(config, CPU)
    assert (isinstance(model, UpgradingModel) and model.native) == (native == "wait")
    rows = sequences()
    run = PackedRun(model, rows, max_len=LONG + 2)
    return [run.step(parts, num_extend).clone() for parts, num_extend in steps(rows)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_in_every_shape(shaped: Callable[..., Path], shape: str) -> None:
    path = shaped(**SHAPES[shape])
    plain, rows = PlainModel(path), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    for got, (parts, _) in zip(logits(path, 2), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_bfloat16_tiles_and_single_rows_agree_with_transformers(shaped: Callable[..., Path]) -> None:
    """Many rows go through tiles and few through vectors where the processor has both."""
    path = shaped(**SHAPES["five quarters of a panel to a head"])
    plain, rows = PlainModel(path, torch.bfloat16), sequences()
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    scale = max(float(found.abs().max()) for found in expected.values())
    for got, (parts, _) in zip(logits(path, 2, "bfloat16"), steps(rows), strict=True):
        want = torch.stack([expected[p.row][p.prefix + p.extend - 1] for p in parts])
        assert float((got - want).abs().max()) < 0.05 * scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCE)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_what_transformers_makes_of_them(
    shaped: Callable[..., Path], shape: str, dtype: str, tolerance: float, quantization: str
) -> None:
    """One row, few and many are three ways through the products, and no shape fills its last panel, or its groups."""
    path = shaped(**SHAPES[shape])
    plain = logits(path, 1, dtype, quantization, native="off")
    scale = max(float(found.abs().max()) for found in plain)
    for got, want in zip(logits(path, 2, dtype, quantization), plain, strict=True):
        assert float((got - want).abs().max()) < tolerance * scale


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_panels_are_read_to_their_end(shaped: Callable[..., Path], quantization: str) -> None:
    """A layer of more inputs than are taken, or widened, at a time."""
    path = shaped(hidden_size=64, intermediate_size=4500, num_hidden_layers=1)
    for dtype, tolerance in TOLERANCE:
        plain = logits(path, 1, dtype, quantization, native="off")
        scale = max(float(found.abs().max()) for found in plain)
        for got, want in zip(logits(path, 2, dtype, quantization), plain, strict=True):
            assert float((got - want).abs().max()) < tolerance * scale


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_do_not_change_a_bit(shaped: Callable[..., Path], dtype: str, quantization: str) -> None:
    """More threads than cores, so that they are taken off their cores within a phase, and again and again."""
    path = shaped()
    alone, more = logits(path, 1, dtype, quantization, **same_bits(dtype)), same_bits(dtype)
    for _ in range(5):
        for one, other in zip(alone, logits(path, 5, dtype, quantization, **more), strict=True):
            assert torch.equal(one, other)
