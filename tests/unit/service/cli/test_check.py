"""`slipstream check`: a few lines, or one object; and one line with exit code 3 for what cannot be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from service.cli.cli import cli
from tests.support.encoders import make_encoder
from tests.support.judges import make_judge


def test_it_says_what_serving_would_be() -> None:
    asked = ["check", "--kv-cache-dtype", "fp8_e4m3", "--native", "off", "--max-total-tokens", "4096"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    told = {line[:22].strip(): line[23:] for line in done.stdout.splitlines()}
    assert (
        told["model"].startswith("slipstream-bundled (") and told["served by"] == "the modules of transformers, on cpu"
    )
    assert told["cache here"].startswith("4,096 tokens (") and told["tokens per second"].startswith("at most ")
    assert set(told) >= {"weights", "context", "cache per token"}
    remarked = CliRunner().invoke(cli, [*asked, "--native", "wait"])
    assert "remark                 served by transformers: native decoders read no keys in fp8_e4m3" in remarked.stdout


def test_as_an_object() -> None:
    done = CliRunner().invoke(cli, ["check", "--json", "--native", "off", "--dtype", "bfloat16"])
    found = json.loads(done.stdout)
    assert found["name"] == "slipstream-bundled" and found["dtype"] == "bfloat16" and found["tokens_per_second"] > 0


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "vocab_size": 9}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    command = [sys.executable, "-m", "service", "check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"slipstream: {tmp_path}: model type 'nonesuch' is unknown")


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service", "check"]
    done = subprocess.run([*command, "/nonexistent"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "slipstream: model directory /nonexistent does not exist\n")
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([*command, "org/other"], capture_output=True, text=True, timeout=60, env=offline)
    told = (
        "slipstream: org/other: HF_HUB_OFFLINE is set, and the cache does not have all of its files; "
        "HF_HUB_OFFLINE=0 lets the server fetch them\n"
    )
    assert (done.returncode, done.stderr) == (3, told)


def test_what_puts_out_no_text_has_labels_and_no_figures_of_a_cache(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path, "ForSequenceClassification", id2label={0: "spam", 1: "ham"})
    shown = CliRunner().invoke(cli, ["check", str(directory), "--native", "off"]).stdout
    assert "labels                 spam, ham\n" in shown and "no text: it embeds, and judges texts and pairs" in shown
    assert "cache" not in shown and "tokens per second" not in shown
    judge = make_judge("llama", tmp_path / "judge", ("spam", "ham"))
    shown = CliRunner().invoke(cli, ["check", str(judge), "--native", "off"]).stdout
    assert "labels                 spam, ham\n" in shown and "cache here" in shown and "tokens per" not in shown
