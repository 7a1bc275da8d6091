"""The CPU benchmark: workloads are what they say, short answers are not timed, both engines give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.engine.random_model import random_module
from service.bench import cpu as bench
from service.bench.cpu import CONTENDERS, MODELS, _make, cpu
from service.bench.peer import Emit, PeerRequest
from service.bench.workloads import NAMES, Measured, Workload, measure, workload

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
