"""The table of families: each has a row, engines take turns, and what an engine cannot do is said in its row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from docs.generate import SUPPORT, tried
from service.bench import families, foreign_engine, spec_peers
from service.bench.contenders import CONTENDERS
from service.bench.cpu import cpu
from service.bench.families import Plan, measure_families
from service.bench.family_shapes import FAMILY_SHAPES
from service.bench.kept_contender import EngineFailed, KeptContender, KeptPeer
from service.bench.random_checkpoint import save_random_checkpoint
from service.bench.spec_peers import ForeignEngine, PeerFailed
from service.bench.workloads import workload

MICRO = {
    **FAMILY_SHAPES["llama"],
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
TASK = {"dtype": "float32", "quantization": "none", "threads": 1}


def test_every_family_that_the_documents_name_has_a_shape() -> None:
    named = [name for kind in ("Attention only", "Recurrent and hybrid") for name in sum_of(tried()[kind])]
    assert set(named) == set(FAMILY_SHAPES)


def sum_of(by_result: dict[str, list[str]]) -> list[str]:
    return [name.strip("`") for result in SUPPORT[:2] for name in by_result[result]]


@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_shapes_are_those_of_a_model_of_their_family(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILY_SHAPES[family]))
    assert 30e6 < model.num_parameters() < 150e6
    assert model.config.eos_token_id < model.config.vocab_size


def test_shapes_have_layers_of_both_kinds() -> None:
    """Windows in four layers of five, or in every other one; what they leave out shows in the others."""
    counted = {
        name: shape["layer_types"].count("full_attention")
        for name, shape in FAMILY_SHAPES.items()
        if "layer_types" in shape
    }
    assert counted.pop("granitemoehybrid") == 0 and counted == {
        "gemma2": 5,
        "gemma3_text": 2,
        "gemma4_text": 2,
        "cohere2": 2,
        "gpt_oss": 5,
        "llama4_text": 2,
        "qwen3_next": 2,
        "lfm2": 3,
    }


class Scripted:
    """Says what it was asked, and gives its rates in turn; `fails`: at the round of this number."""

    def __init__(self, name: str, asked: list[Any], rates: list[float], fails: int = -1) -> None:
        self.name, self.asked, self.rates, self.fails = name, asked, rates, fails

    def rate(self, load: str, number: int) -> float:
        if number == self.fails:
            raise EngineFailed("Traceback\n  a line\nValueError: no such | layer\n")
        self.asked.append((self.name, load, number))
        return self.rates[number]

    def close(self) -> None:
        self.asked.append((self.name, "closed"))


def scripted(monkeypatch: pytest.MonkeyPatch, fails: int = -1) -> list[Any]:
    asked: list[Any] = []
    rates = {"slipstream": [999.0, 10.0, 30.0, 20.0], "transformers": [999.0, 4.0, 6.0, 5.0], "vLLM": [999.0, 8, 8, 8]}

    def make(_: str, task: dict[str, Any], __: Path) -> Scripted:
        return Scripted(task["contender"], asked, rates[task["contender"]])

    monkeypatch.setattr(families, "KeptContender", make)
    monkeypatch.setattr(families, "_peer", lambda *_: Scripted("vLLM", asked, rates["vLLM"], fails))
    monkeypatch.setattr(families, "is_installed", lambda *_: True)
    monkeypatch.setitem(FAMILY_SHAPES, "llama", MICRO)
    return asked


def test_engines_take_turns_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = scripted(monkeypatch)
    (row,) = measure_families(Plan(["llama"], ["W2"], ["float32"], 3, 1, "python"))
    names = ["slipstream", "transformers", "vLLM"]
    assert asked == [(name, "W2", number) for number in range(4) for name in names] + [(n, "closed") for n in names]
    assert row.rates == {"slipstream": {"W2": 20.0}, "transformers": {"W2": 5.0}, "vLLM": {"W2": 8.0}}
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("| llama")] == [
        "| llama | float32 | slipstream | 20.0 |  |",
        "| llama | float32 | transformers | 5.0 | 4.00 |",
        "| llama | float32 | vLLM | 8.0 | 2.50 |",
    ]
    told = printed.err.splitlines()[1:]
    assert len(told) == 12 and told[0] == "  warm-up, W2: slipstream 999.0 tokens/s"
    assert told[-1] == "  round 3 of 3, W2: vLLM 8.0 tokens/s", "each rate is told as it comes"


def test_an_engine_that_fails_is_left_out_and_its_row_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = scripted(monkeypatch, fails=1)
    (row,) = measure_families(Plan(["llama"], ["W1", "W2"], ["float32"], 2, 1, "python"))
    assert [each for each in asked if each[0] == "vLLM"] == [("vLLM", "W1", 0), ("vLLM", "W2", 0), ("vLLM", "closed")]
    assert row.failed == {"vLLM": "ValueError: no such | layer"} and set(row.rates) == {"slipstream", "transformers"}
    cells = [line.count("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert cells == [8] * 5, "every row has as many cells as the header"


def test_a_peer_that_cannot_start_costs_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)

    def cannot(*_: object) -> KeptPeer:
        raise PeerFailed("loading\nno kernel for it\n")

    monkeypatch.setattr(families, "_peer", cannot)
    (row,) = measure_families(Plan(["llama"], ["W2"], ["float32"], 1, 1, "python"))
    assert row.failed == {"vLLM": "no kernel for it"} and set(row.rates) == {"slipstream", "transformers"}


def test_the_command_measures_the_families_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    arguments = [
        "--families",
        "--models",
        "llama",
        "--workloads",
        "W2",
        "--rounds",
        "1",
        "--dtype",
        "float32",
        "--json",
    ]
    result = CliRunner().invoke(cpu, arguments, catch_exceptions=False)
    (found,) = json.loads(result.output.splitlines()[-1])
    assert found["family"] == "llama" and found["rates"]["slipstream"] == {"W2": 10.0}
    result = CliRunner().invoke(cpu, ["--families", "--models", "lama"])
    assert result.exit_code == 2 and "'lama' is none of llama, qwen2" in result.output


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("micro")
    save_random_checkpoint(MICRO | {"model_type": "llama"}, torch.float32, directory)
    return directory


def test_a_kept_engine_is_measured_more_than_once_and_says_why_it_ended(micro: Path, tmp_path: Path) -> None:
    kept = KeptContender(str(micro), TASK | {"contender": "transformers"}, tmp_path / "log")
    assert kept.rate("W3", 0) > 0 and kept.rate("W3", 1) > 0
    with pytest.raises(EngineFailed, match="W9"):
        kept.rate("W9", 0)
    kept.close()


def test_an_engine_is_made_with_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights say the same tokens in eight bits, so outputs would not tell."""
    made: list[Any] = []
    monkeypatch.setattr("service.bench.peer.Peer", lambda *given, **options: made.append((given, options)))
    CONTENDERS["slipstream"]("directory", "float32", "int8", 3)
    assert made == [(("directory", 3), {"dtype": "float32", "quantization": "int8"})]


COUNTS = """
def start(task):
    assert task["streams"] == 64, task
    return (lambda group: [[len(group)] * (count - (prompt[0] == 1)) for prompt, count in group]), {}
"""


def test_a_peer_gets_requests_together_where_the_workload_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    source = Path(foreign_engine.__file__).read_text()
    script.write_text(source.replace('if __name__ == "__main__":', f'{COUNTS}\nENGINES["counts"] = start\n\nif True:'))
    monkeypatch.setattr(spec_peers, "SCRIPT", script)
    monkeypatch.setitem(spec_peers.MODULES, "counts", "counts")
    monkeypatch.setitem(spec_peers.PRELOADED, "counts", ())
    engine = ForeignEngine(sys.executable, "counts", "m", 0, "float32", 1, tmp_path, context=4096, streams=64)
    seen: list[list[int]] = []
    run = engine.run_groups

    def watched(groups: Any) -> Any:
        ran = run(groups)
        seen.append([output[0] for output in ran.outputs])
        return ran

    monkeypatch.setattr(engine, "run_groups", watched)
    peer = KeptPeer(engine, 400)
    assert all(peer.rate(load, 1) > 0 for load in ("W1", "W2", "W3w"))
    assert seen == [[64] * 64, [1] * 5, [1], [32] * 32]
    monkeypatch.setattr("service.bench.kept_contender.workload", lambda *_: short_of_one(workload("W2", 400, 1)))
    with pytest.raises(EngineFailed, match=r"requests \[0\] were answered"):
        peer.rate("W2", 1)
    peer.close()


def short_of_one(work: Any) -> Any:
    work.requests[0]["prompt"][0] = 1
    return work
