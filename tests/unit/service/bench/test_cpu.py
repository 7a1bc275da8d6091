"""The CPU benchmark: workloads are what they say, short answers are not timed, both engines give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.config import EngineConfig
from core.engine.random_model import random_module
from service.bench import cpu as bench
from service.bench import peer, workloads
from service.bench.cpu import CONTENDERS, MODELS, _make, cpu
from service.bench.peer import Emit, Peer, PeerRequest
from service.bench.transformers_peer import _Watch
from service.bench.workloads import NAMES, Measured, Workload, measure, workload
from tests.support.fakes.hand_clock import HandClock, by_hand

SHAPE = {**MODELS["tiny"], "vocab_size": 400, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}


class Counting:
    """Answers every request with its number of tokens, less `missing`."""

    def __init__(self, missing: int = 0) -> None:
        self.runs: list[list[int]] = []
        self.missing = missing

    def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        self.runs.append([request["id"] for request in requests])
        for request in requests:
            for token in range(request["max_new"] - self.missing):
                emit(request["id"], token)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "micro", SHAPE)
        size = _make("micro", str(directory), "float32", "none")
    module = random_module(SHAPE, bench.torch.float32, bench.torch.device("cpu"))
    read = sum(p.numel() for p in module.parameters()) - SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert size == 4 * read
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "micro", SHAPE)
        norms = SHAPE["hidden_size"] * (2 * SHAPE["num_hidden_layers"] + 1)
        packed = _make("micro", str(tmp_path_factory.mktemp("int8")), "float32", "int8")
    assert packed == read - norms + 4 * norms
    return directory


def test_requests_come_as_the_workload_says() -> None:
    seen = {}
    for name in NAMES:
        contender = Counting()
        measure(contender, workload(name, 8192, 1))
        seen[name] = [len(run) for run in contender.runs]
    assert seen == {"W1": [64], "W2": [1] * 5, "W3": [32], "W3w": [1, 32]}


def test_rounds_share_no_prefix_and_requests_of_one_do() -> None:
    first, second = (workload("W3", 8192, number).requests for number in (1, 2))
    assert all(request["prompt"][:512] == first[0]["prompt"][:512] for request in first)
    assert first[0]["prompt"][:4] != second[0]["prompt"][:4]
    assert first == workload("W3", 8192, 1).requests


def test_a_short_answer_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="another number of tokens"):
        measure(Counting(missing=1), workload("W2", 8192, 1))


@pytest.mark.parametrize(("together", "quantization"), [(True, "none"), (False, "none"), (True, "int8")])
def test_both_engines_give_the_same_tokens(checkpoint: Path, together: bool, quantization: str) -> None:
    requests = tuple(
        PeerRequest(id=i, prompt=[10 + (i * 37 + j * j) % 380 for j in range(5 + 9 * i)], max_new=6 + i)
        for i in range(4)
    )
    answers = {}
    for name, make in CONTENDERS.items():
        contender, tokens = (
            make(str(checkpoint), "float32", quantization, 1),
            {request["id"]: [] for request in requests},
        )
        for group in [requests] if together else [(request,) for request in requests]:
            contender.run(group, lambda request, token, tokens=tokens: tokens[request].append(token))
        assert measure(contender, Workload(requests, together)).rate > 0
        contender.close()
        answers[name] = tokens
    assert answers["slipstream"] == answers["transformers"]


def test_the_command_prints_medians_and_the_share_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "micro", SHAPE)
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 22)
    rates = iter([10.0, 1.0, 30.0, 3.0, 20.0, 2.0])
    monkeypatch.setattr(
        bench,
        "_rounds",
        lambda *_: [(name, "W2", Measured(next(rates), 0.5, 0.25)) for _ in range(3) for name in CONTENDERS],
    )
    arguments = ["--models", "micro", "--workloads", "W2", "--json"]
    result = CliRunner().invoke(cpu, arguments, catch_exceptions=False)
    assert "| slipstream | 20.0 |" in result.output and "| transformers | 2.0 |" in result.output
    assert "250.00 ms between tokens" in result.output
    found = json.loads(result.output.splitlines()[-1])["micro"]
    assert found["medians"]["slipstream"]["W2"] == {"rate": 20.0, "ttft": 0.5, "itl": 0.25}
    assert found["read_bytes_per_second"] > 0


def test_an_unknown_model_is_refused_by_name() -> None:
    result = CliRunner().invoke(cpu, ["--models", "huge"])
    assert result.exit_code == 2 and "'huge' is none of tiny, small" in result.output


class Timed:
    """Takes 8 s to the first token of each call and 2 s to each that follows, whatever is asked for."""

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock

    def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        self.clock.work(8.0)
        for token in range(requests[0]["max_new"]):
            self.clock.work(2.0 if token else 0.0)
            for request in requests:
                emit(request["id"], token)

    def close(self) -> None: ...


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes after another waits for its own first token only, and a lead is not timed."""
    clock = by_hand(monkeypatch, workloads)
    requests = tuple(PeerRequest(id=i, prompt=[1], max_new=4) for i in range(3))
    assert measure(Timed(clock), Workload(requests, together=False)) == Measured(12 / 42, 8.0, 2.0)
    assert measure(Timed(clock), Workload(requests, lead=1)) == Measured(8 / 14, 8.0, 2.0)


def test_the_share_of_the_roofline_is_what_is_read_by_what_can_be_read() -> None:
    medians = {
        "slipstream": {"W1": {"rate": 1234.5}, "W2": {"rate": 10.0, "itl": 0.1}},
        "transformers": {"W1": {"rate": 99.0}, "W2": {"rate": 5.0, "itl": 0.2}},
    }
    lines = bench._table("micro", ["W1", "W2"], medians, 400_000_000, 16e9).splitlines()
    assert lines[2:4] == ["| slipstream | 1,234.5 | 10.0 |", "| transformers | 99.0 | 5.0 |"]
    told = "W2: 4.0 GB/s of weights read, 25% of the 16.0 GB/s that torch.sum reads; 100.00 ms between tokens"
    assert lines[-1] == told


def test_a_process_warms_up_with_ids_that_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[int]] = []

    class Recording(Counting):
        def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
            seen.append(requests[0]["prompt"])
            super().run(requests, emit)

    monkeypatch.setitem(CONTENDERS, "recording", lambda *_: Recording())
    (tmp_path / "config.json").write_text('{"vocab_size": 8192}')
    task = {"contender": "recording", "dtype": "", "quantization": "", "threads": 1, "round": 2, "loads": ["W1", "W3"]}
    bench.run_here(str(tmp_path), json.dumps(task))
    measured = [workload(load, 8192, 2).requests[0]["prompt"] for load in ("W1", "W3")]
    assert seen == [workload("W3", 8192, 0).requests[0]["prompt"], *measured]
    assert list(json.loads(capsys.readouterr().out)) == ["W1", "W3"]


def test_options_of_a_peer_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[EngineConfig] = []

    class Engine:
        def __init__(self, config: EngineConfig) -> None:
            built.append(config)

        async def start(self) -> Engine:
            return self

        async def stop(self) -> None: ...

    monkeypatch.setattr(peer, "build_engine", Engine)
    Peer("/m", 3).close()
    changed = Peer("/m", 2, dtype="fp32", quantization="int8", chunk="64", native="off", overlap="off")
    told = changed.info()
    changed.close()
    plain, other = built
    assert (plain.model.dtype, plain.model.quantization, plain.executor.overlap) == ("bfloat16", "none", True)
    assert (other.model.dtype, other.model.quantization, other.executor.overlap) == ("float32", "int8", False)
    assert (plain.executor.cpu_threads, other.executor.cpu_threads) == (3, 2)
    assert (other.model.native, other.scheduler.prompt_tokens) == ("off", 64)
    assert (told["dtype"], told["quantization"], told["chunked_prefill_size"]) == ("float32", "int8", 64)


def test_who_has_all_tokens_is_told_of_no_more() -> None:
    """`generate` goes on with the whole batch until its longest request is through."""
    torch, seen = bench.torch, []
    requests = [PeerRequest(id=7, prompt=[1], max_new=1), PeerRequest(id=8, prompt=[1], max_new=3)]
    watch = _Watch(requests, lambda request, token: seen.append((request, token)))
    for step in range(3):
        goes_on = watch(torch.tensor([[0, 10 + step], [0, 20 + step]]), torch.empty(0))
        assert not goes_on.any()
    assert seen == [(7, 10), (8, 20), (8, 21), (8, 22)]


def test_a_checkpoint_has_the_weights_of_its_type_and_a_tokenizer(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from core.models.bundled import bundled_model_dir
    from service.bench.random_checkpoint import save_random_checkpoint

    module = save_random_checkpoint(SHAPE, bench.torch.bfloat16, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {bench.torch.bfloat16}
    assert all(bench.torch.equal(stored[name], value) for name, value in module.named_parameters() if name in stored)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == SHAPE["vocab_size"]
    assert (tmp_path / "tokenizer.json").read_bytes() == (bundled_model_dir() / "tokenizer.json").read_bytes()
