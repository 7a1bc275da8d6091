"""`slipstream bench gpu` on the CPU with a tiny model: every line of it runs, and its arithmetic is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from core.engine.random_model import as_model, random_module
from core.errors import ConfigError
from service.bench.decode_load import Load
from service.bench.gpu import SHAPES, gpu
from service.bench.roofline import Demands, Peaks

CPU = torch.device("cpu")


def test_it_measures_decode_prefill_and_transformers(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "1,3", "--contexts", "16", "--steps", "6"]
    done = CliRunner().invoke(gpu, [*small, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert [(row["batch"], row["overlap"]) for row in found["decode"]] == [(1, True), (3, True), (1, False), (3, False)]
    for row in found["decode"]:
        assert row["tokens_per_second"] > 0 and 0 <= row["idle_share"] < 1
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_ms"] * 1000, rel=1e-6)
    assert [row["context"] for row in found["prefill"]] == [16]
    assert set(found["transformers"]) == {"1x16", "3x16"}
    assert all(other.get("tokens_per_second", 0) > 0 for other in found["transformers"].values()), found["transformers"]
    assert found["device"] == "cpu" and len(found["date"]) == 10


def test_loads_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.bench.gpu.CPU_POOL", 600_000)
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "1,64", "--contexts", "16", "--steps", "6"]
    done = CliRunner().invoke(gpu, [*small, "--no-transformers", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["decode"]
    assert ["left_out" in row for row in rows] == [False, True, False, True]
    assert "needs" in rows[1]["left_out"] and rows[1]["left_out"] in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_without_a_device_it_says_so() -> None:
    done = CliRunner().invoke(gpu, [])
    assert isinstance(done.exception, ConfigError) and "CUDA" in str(done.exception)


def test_demands_of_a_decoder_by_hand() -> None:
    module = random_module(SHAPES["tiny"], torch.float32, CPU)
    hidden, inner, vocab, layers, heads, kv = 32, 48, 320, 2, 4, 2
    attention = hidden * hidden * 2 + 2 * hidden * hidden * kv // heads
    norms = 2 * hidden
    weights = layers * (attention + 3 * hidden * inner + norms) + hidden
    demands = Demands.of(module, 100)
    assert demands.weight_bytes == 4 * (weights + vocab * hidden)
    assert demands.linear_flops_per_token == 2 * weights
    assert demands.attention_flops_per_pair == 4 * layers * hidden
    assert demands.decode_bytes(3, 10) == demands.weight_bytes + 3000
    assert demands.prefill_flops(10) == 20 * weights + 50 * 4 * layers * hidden


def test_the_roof_is_the_better_bandwidth() -> None:
    assert Peaks(2.0, 3.0, 1.0).roof == 3.0 and Peaks(2.0, None, 1.0).roof == 2.0


def test_random_weights_are_seeded_and_serve() -> None:
    first, second = (random_module(SHAPES["tiny"], torch.float32, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert as_model(first).spec.vocab_size == 320


def test_a_load_has_room_for_who_comes_late() -> None:
    load = Load(batch=64, context=8192, steps=32, vocab=9)
    assert load.lengths() == [98] * 64 and load.tokens == 64 * (8192 + 98 + 32)
    assert load.mean_context == 8192 + 49
