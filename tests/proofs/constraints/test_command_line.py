"""`slipstream generate` with a constraint and an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli.commands.generate import generate
from tests.support.checkpoints import make_checkpoint

pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")


def test_choices_and_schemas(tmp_path: Path) -> None:
    model = str(make_checkpoint("llama", tmp_path / "model", seed=0))
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["only this"]}')
    asked = ["hello", "--model", model, "--max-tokens", "30", "--temperature", "0"]
    chosen = CliRunner().invoke(generate, [*asked, "--choice", "yes", "--choice", "no"])
    assert chosen.exit_code == 0 and chosen.stdout.strip() in ("yes", "no"), chosen.output
    json = CliRunner().invoke(generate, [*asked, "--json-schema", str(schema)])
    assert json.exit_code == 0 and json.stdout.strip() == '"only this"', json.output


def test_one_constraint_at_a_time() -> None:
    both = CliRunner().invoke(generate, ["hello", "--regex", "a", "--choice", "b"])
    assert both.exit_code == 2 and "exclude each other" in both.output
