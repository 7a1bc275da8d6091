"""`slipstream bench gpu` on the CPU with a tiny model: every line of it runs, and its arithmetic is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from core.engine import random_model
from core.engine.random_model import as_model, random_module
from core.errors import ConfigError
from core.types.io import Delta, GenerateRequest
from service.bench import decode_load, kept_figures, roofline
from service.bench.decode_load import DecodeFigures, Load, watch_decode, watch_transformers
from service.bench.gpu import SHAPES, Bench, _report, gpu
from service.bench.kept_figures import Budget, keep
from service.bench.roofline import Demands, Peaks
from tests.support.fakes.hand_clock import by_hand

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


def test_its_parts_are_the_own_figures_and_those_beside_a_peer() -> None:
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "2", "--contexts", "16", "--steps", "6", "--json"]
    said = [CliRunner().invoke(gpu, [*small, "--part", part]).stdout for part in ("own", "peer", "mixed")]
    own, peer, mixed = (json.loads(each.splitlines()[-1]) for each in said)
    assert [row["overlap"] for row in own["decode"]] == [True, False] and own["prefill"] and not own["transformers"]
    assert [row["step_ms"] > 0 for row in mixed["mixed"]] == [True] * 4 and not (own["mixed"] or peer["mixed"])
    assert not (mixed["decode"] or mixed["prefill"] or mixed["transformers"])
    assert [row["overlap"] for row in peer["decode"]] == [True] and not peer["prefill"]
    assert peer["transformers"]["2x16"]["tokens_per_second"] > 0
    assert all(row["prompt_tokens_per_second"] > 0 for row in own["decode"])


def test_the_file_is_written_after_each_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed in its last figure leaves the others."""
    out, watched = tmp_path / "gpu.json", []

    async def watch(engine: Any, load: Load) -> DecodeFigures:
        watched.append(len(json.loads(out.read_text())["decode"]) if watched else 0)
        if len(watched) == 3:
            raise KeyboardInterrupt
        return DecodeFigures(1.0, 1.0, 0.0)

    monkeypatch.setattr("service.bench.gpu.watch_decode", watch)
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "1,2,3", "--contexts", "16", "--steps", "6"]
    done = CliRunner().invoke(gpu, [*small, "--part", "own", "--out", str(out)])
    assert done.exit_code and watched == [0, 1, 2]
    kept = json.loads(out.read_text())
    assert [row["batch"] for row in kept["decode"]] == [1, 2] and len(kept["prefill"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_no_figure_is_begun_that_the_budget_has_no_room_for() -> None:
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "1", "--contexts", "16", "--steps", "6", "--json"]
    done = CliRunner().invoke(gpu, [*small, "--budget", "0"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"] == {"1x16": {"failed": "RuntimeError: the 0 s of --budget have no room for it"}}
    assert [row["left_out"] for row in found["decode"]] == ["the 0 s of --budget have no room for it"] * 2
    assert found["prefill"] == [] and all("left_out" in row for row in found["mixed"])


def test_a_figure_has_room_where_the_longest_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = by_hand(monkeypatch, kept_figures)
    budget = Budget(10.0)
    assert budget.allows()
    clock.work(4.0)
    assert budget.allows() and not budget.allows(share=0.5)
    clock.work(1.5)
    assert budget.allows(), "of turns it is the longest, not their sum"
    clock.work(1.0)
    assert not budget.allows()


def test_a_peer_begins_no_load_in_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is measured beside it with the same loads."""
    clock = by_hand(monkeypatch, kept_figures)
    begun: list[int] = []

    def watch(module: Any, load: Load, page: int) -> DecodeFigures:
        clock.work(3.0)
        begun.append(load.batch)
        return DecodeFigures(1.0, 1.0, None)

    monkeypatch.setattr("service.bench.gpu.watch_transformers", watch)
    monkeypatch.setattr("service.bench.gpu.measure_peaks", lambda *_: Peaks(1.0, None, 1.0))
    loads = [Load(batch, 16, 6, 9) for batch in (1, 2)]
    bench = Bench(CPU, "tiny", loads, "auto", Budget(10.0), lambda _: None)
    bench.run_transformers()
    assert begun == [1] and "no room" in bench.beside["2x16"]["failed"]


def test_a_kill_in_the_middle_leaves_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    keep({"decode": [1]}, str(path))
    whole = path.read_text()

    def killed(self: Path, text: str) -> int:
        with self.open("w") as out:
            out.write(text[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        keep({"decode": [1, 2]}, str(path))
    assert path.read_text() == whole


async def test_prompts_are_those_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds from the first question until all have their first token, which this clock says are two."""
    clock = by_hand(monkeypatch, decode_load)
    tokens = iter(range(99))

    async def stream() -> AsyncIterator[Delta]:
        clock.work(1.0)
        for _ in range(4):
            yield Delta(0, 0, (1,))
            await asyncio.sleep(0.004)

    class Engine:
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            return stream()

        @property
        def stats(self) -> Any:
            clock.work(0.5)
            return SimpleNamespace(generation_tokens=next(tokens), device_idle_ratio=0.0)

    engine: Any = Engine()
    figures = await watch_decode(engine, Load(batch=2, context=7, steps=40, vocab=9))
    assert figures.prompt_tokens_per_second == 2 * 7 / 2.0


def test_loads_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.bench.gpu.CPU_POOL", 600_000)
    small = ["--device", "cpu", "--shape", "tiny", "--batches", "1,64", "--contexts", "16", "--steps", "6"]
    done = CliRunner().invoke(gpu, [*small, "--part", "own", "--json"])
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


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")
def test_what_is_measured_on_a_gpu_is_what_is_served_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the layers of transformers with fused parts, which the first run on a GPU measured."""
    from core.models.fused import upgrade

    monkeypatch.setattr(upgrade, "with_fused", lambda model: ("fused", model.spec.vocab_size))
    first, second = (random_module(SHAPES["tiny"], torch.float32, CPU) for _ in range(2))
    assert as_model(first).spec.vocab_size == 320, "a CPU has no such decoder"
    monkeypatch.setattr(random_model, "wanted", lambda device: device == CPU)
    assert as_model(second) == ("fused", 320)


def test_transformers_has_pages_to_begin_its_last_prompt() -> None:
    """Of 64 prompts of 1,024 tokens the last waited for outputs to end, and the load was refused as not at once."""
    asked: list[int] = []

    class Module:
        def init_continuous_batching(self, *, continuous_batching_config: Any, **_: Any) -> None:
            asked.append(continuous_batching_config.num_blocks)
            raise NotImplementedError

    load = Load(batch=64, context=1024, steps=64, vocab=9)
    with pytest.raises(NotImplementedError):
        watch_transformers(Module(), load, 16)
    assert asked[0] * 0.8 >= 64 * (load.context + load.lengths()[0]) / 16


def test_a_load_has_room_for_who_comes_late() -> None:
    load = Load(batch=64, context=8192, steps=32, vocab=9)
    assert load.lengths() == [98] * 64 and load.tokens == 64 * (8192 + 98 + 32)
    assert load.mean_context == 8192 + 49


class Batching:
    """Stands where transformers' continuous batching would, with tokens at instants that are known."""

    def __init__(self, *times: list[float]) -> None:
        self.results = [SimpleNamespace(is_finished=lambda: True, error=None, timestamps=each) for each in times]
        self.asked: list[dict[str, Any]] = []

    def init_continuous_batching(self, **_: Any) -> Batching:
        return self

    def start(self) -> None: ...

    def stop(self, **_: Any) -> None: ...

    def add_request(self, **asked: Any) -> None:
        self.asked.append(asked)

    def get_result(self, timeout: float) -> Any:
        return self.results.pop()


def test_transformers_is_watched_while_all_of_its_requests_decode() -> None:
    """From the last that begins to the first that ends: what comes before or after had fewer requests in it."""
    late, early = [4.0, 5.0, 6.0, 7.0, 8.0], [1.0, 1.5, 2.0, 5.0, 6.0]
    batching, load = Batching(late, early), Load(batch=2, context=3, steps=2, vocab=9)
    assert watch_transformers(batching, load, 16) == DecodeFigures(2.0, 1000.0, None)
    assert [each["input_ids"] for each in batching.asked] == load.prompts()


def test_peaks_are_bytes_and_operations_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_best", lambda work, device: 0.5)
    # A copy reads each byte and writes it; a product multiplies and adds.
    assert roofline.measure_peaks(CPU, torch.float32) == Peaks(4 * roofline.CPU_BYTES, None, 4 * roofline.CPU_SIDE**3)


def test_the_best_run_is_the_quickest_and_warming_up_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = by_hand(monkeypatch, roofline)
    took = iter([1.0] * roofline.WARM_UPS + [9.0, 3.0] + [5.0] * roofline.REPEATS)
    assert roofline._best(lambda: clock.work(next(took)), CPU) == 3.0


def test_figures_are_printed_in_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    decode = {"batch": 8, "context": 1024, "overlap": True, "tokens_per_second": 4000.0, "step_ms": 2.0}
    result = {
        "date": "2026-01-01",
        "device": "H",
        "torch": "2",
        "shape": "8b",
        "dtype": "bfloat16",
        "decode": [decode | {"idle_share": 0.0125, "roofline": 0.5}],
        "prefill": [{"context": 1024, "ttft_ms": 31.26, "matmul_share": 0.75}],
        "mixed": [{"cuda_graphs": False, "overlap": True, "batch": 8, "chunk": 9, "left_out": "no time"}],
        "transformers": {"8x1024": {"tokens_per_second": 1000.0}, "1x1024": {"failed": "does not fit"}},
    }
    _report(result, Peaks(3.2e12, 4.8e12, 7e14))
    said = capsys.readouterr().out
    assert "memory 3.20 TB/s copied, 4.80 stated; matmul 700.0 TFLOP/s" in said
    assert "    8     1024      on       4000     2.00     50.0%   1.25%  1000\n" in said
    assert "prompt of 1024 alone: first token after 31.3 ms, 75.0% of the matmul peak" in said
    assert "mixed steps with graphs off and overlap on: 9 prompt tokens beside 8 rows: no time\n" in said
    assert "transformers 1x1024: does not fit" in said
