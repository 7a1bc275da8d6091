"""`slipstream bench deterministic` tells what the setting costs, and whose bits depend on the batch without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from service.bench import deterministic as bench
from service.bench.deterministic import SHAPES, Figures, Work, deterministic

SMALL = {
    **SHAPES["windows"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
WORKS = (Work("a few", 3, 90, 9), Work("prompts", 2, 130, 1))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "windows", SMALL)
    monkeypatch.setattr(bench, "WORKS", WORKS)
    monkeypatch.setattr(bench, "shorten_switch_interval", lambda **_: None)


def run(*arguments: str) -> tuple[int, list[dict[str, object]], str]:
    done = CliRunner().invoke(deterministic, [*arguments, "--rounds", "1", "--json"])
    return done.exit_code, json.loads(done.output.splitlines()[-1]), done.output


def test_windows_hear_of_their_company_without_the_setting_alone() -> None:
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
    code, told, output = run("--models", "windows", "--quantizations", "none,int8")
    assert code == 0 and len(told) == 2 * len(WORKS)
    assert output.startswith("| model | weights | work |") and "| windows | int8, bfloat16 | a few |" in output
    differ = [each["differ"] for each in told]
    assert all(isinstance(each, dict) and each["true"] == 0 for each in differ)
    assert any(isinstance(each, dict) and each["false"] for each in differ)
    assert all(isinstance(each["ratio"], float) and each["ratio"] > 0 for each in told)


def test_a_bit_that_differs_in_the_deterministic_engine_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Figures(WORKS[0], {False: [2.0, 4.0, 4.0], True: [1.0, 4.0, 3.0]}, {False: 3, True: 1})
    monkeypatch.setattr(bench, "_measured", lambda *_: iter([found]))
    code, told, output = run("--models", "windows", "--quantizations", "none")
    assert code == 1 and told[0]["ratio"] == 0.75
    assert "| a few | 4 | 3 | 0.75 | 3 of 3 | 1 of 3 |" in output


def test_a_model_that_there_is_none_of_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(deterministic, ["--models", str(tmp_path / "none")])
    assert done.exit_code == 2 and "is none of tiny, small, windows, experts, nor a folder" in done.output
