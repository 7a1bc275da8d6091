"""The benchmark of several engines behind one server: figures are measured, and the router makes the difference."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from service.bench import bench, replicas
from service.replicas.prompt_pieces import Prompt


def test_in_turn_means_each_in_turn() -> None:
    router = replicas.InTurn(3)
    prompt = Prompt((1, 2), 128)
    assert [router.order(prompt, range(3))[0] for _ in range(6)] == [1, 2, 0, 1, 2, 0]
    assert sorted(router.order(prompt, range(3))) == [0, 1, 2], "the others are there where one refuses"
    assert router.order(prompt, (2,)) == [2]


def test_all_figures_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(replicas, "FAMILY_SHAPES", {"llama": shape | heads})
    monkeypatch.setattr(replicas, "STREAMS", (1, 4))
    monkeypatch.setattr(replicas, "TALKS", 4)
    # Of the whole process, and tests have one already.
    monkeypatch.setattr(replicas, "shorten_switch_interval", lambda *, writes: None)
    answer = CliRunner().invoke(bench, ["replicas", "--rounds", "1", "--dtype", "float32", "--json"])
    assert answer.exit_code == 0, answer.output
    for line in ("1 streams of 128 + 64 tokens", "one in a process of its own", "2 engines", "8 conversations"):
        assert line in answer.output
    found = json.loads(answer.output.splitlines()[-1])
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates.values())
    assert found["cached"]["with the router"] > found["cached"]["in turn"] > 0
