"""`slipstream check --json` says in JSON too why a model would be refused, and ends as it does without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.errors import ModelLoadError
from service.cli.cli import cli


@pytest.mark.parametrize("made", [True, False], ids=["no checkpoint", "no directory"])
def test_a_refusal_is_an_object_too(made: bool, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    if made:
        directory.mkdir()
    plain = CliRunner().invoke(cli, ["check", str(directory)])
    done = CliRunner().invoke(cli, ["check", "--json", str(directory)])
    assert plain.stdout == "" and isinstance(done.exception, ModelLoadError)
    assert json.loads(done.stdout) == {"refused": str(plain.exception)} == {"refused": str(done.exception)}
