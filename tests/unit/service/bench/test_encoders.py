"""`slipstream bench encoders`: figures of both for the same texts, in rounds that take turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from service.bench import encoder_peer, encoder_works, encoders
from service.bench.encoders import Figures
from service.cli.cli import cli


def test_it_measures_both_on_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    shape = {**encoder_works.SHAPES["minilm"], **small, "vocab_size": 2100}
    monkeypatch.setattr(encoders, "SHAPES", {"minilm": shape})
    asked = ["bench", "encoders", "--models", "minilm", "--rounds", "2", "--threads", "1", "--json"]
    done = CliRunner().invoke(cli, [*asked, "--peer-python", sys.executable])
    assert done.exit_code == 0, done.output
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    works = [*encoder_works.texts_to_embed(), *encoder_works.pairs_to_judge()]
    assert [each["work"] for each in found] == works
    assert all(len(each["ours"]) == len(each["peer"]) == 2 and each["ratio"] > 0 for each in found)
    assert [row.split(" | ")[2] for row in table[2:]] == works
    assert "the peer is transformers" in done.stderr and "warm-up" in done.stderr


def test_padding_of_the_peer_is_no_part_of_its_vectors(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    shape = {**encoder_works.SHAPES["minilm"], **small, "vocab_size": 2100}
    encoder_works.save_encoder(shape, torch.float32, tmp_path, judges=False)
    run = encoder_peer._plain(torch, str(tmp_path), torch.float32, False)
    with torch.inference_mode():
        (together,) = run(["w1 w2 w3 w4 w5", "w1"])
        alone = [run([text])[0][0] for text in ("w1 w2 w3 w4 w5", "w1")]
    torch.testing.assert_close(together, torch.stack(alone))


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    assert Figures("a", "float32", "b", [1.0, 4.0, 9.0], [1.0, 1.0, 1.0]).ratio == 4.0


def test_a_model_or_a_peer_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(cli, ["bench", "encoders", "--models", "nonesuch"])
    assert done.exit_code == 2 and "'nonesuch' is none of minilm" in done.output
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(encoders, "save_encoder", lambda *_, **__: None)
    done = CliRunner().invoke(cli, ["bench", "encoders", "--models", "minilm", "--peer-python", str(broken)])
    assert done.exit_code == 1 and "the peer could not start: no such library" in done.output
