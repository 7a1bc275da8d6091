"""An answer that is kept stands for the oracle only where the oracle would say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.proofs.equivalence.references import MODE_ENV, References, made_by, references

ANSWER = [[1, 2], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def written(model: Path, tmp_path: Path) -> Path:
    """References that hold ANSWER to "why" and to "how"."""
    path = tmp_path / "references.json"
    writing = References(path, "write")
    for question in ("why", "how"):
        assert writing.outputs(model, [question], lambda: [(1, 2), None]) == ANSWER
    assert len(json.loads(path.read_text())[made_by()]) == 2
    return path


def was_asked(path: Path, model: Path, question: str = "why", mode: str = "kept") -> bool:
    asked: list[bool] = []
    assert References(path, mode).outputs(model, [question], lambda: asked.append(True) or ANSWER) == ANSWER
    return bool(asked)


def test_what_is_kept_is_not_asked_again(written: Path, model: Path) -> None:
    assert not was_asked(written, model) and not was_asked(written, model, "how")
    assert was_asked(written, model, "when"), "another question"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "model-2.safetensors"])
def test_another_checkpoint_is_asked_about(written: Path, model: Path, name: str) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    assert not was_asked(written, model), "no answer in token ids depends on the tokenizer"
    (model / name).write_bytes(b"other")
    assert was_asked(written, model)


def test_another_version_is_asked(written: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert was_asked(written, model)


def test_a_check_asks_and_notices_another_answer(written: Path, model: Path) -> None:
    assert was_asked(written, model, mode="check")
    with pytest.raises(AssertionError, match="another answer about model"):
        References(written, "check").outputs(model, ["why"], lambda: [[1, 3], None])


def test_a_check_notices_a_file_that_is_out_of_date(
    written: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="no answer about model: REFERENCES=write"):
        References(written, "check").outputs(model, ["when"], lambda: ANSWER)
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert was_asked(written, model, "when", mode="check"), "nothing was written with these versions"


def test_writing_begins_anew_and_keeps_what_others_made(
    written: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made_by()
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert was_asked(written, model, mode="write") and not was_asked(written, model)
    assert was_asked(written, model, "how", mode="write") and was_asked(written, model)
    kept = json.loads(written.read_text())
    assert {maker: len(answers) for maker, answers in kept.items()} == {first: 2, made_by(): 1}
    monkeypatch.undo()
    assert not was_asked(written, model)


def test_modes_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_ENV, "none")
    with pytest.raises(ValueError, match="REFERENCES=none: choose from kept, check, write"):
        references.__wrapped__()
