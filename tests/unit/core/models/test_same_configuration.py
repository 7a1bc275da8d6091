"""The same model with other numbers has the same configuration, whichever version of a trainer wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelLoadError
from core.models import same_configuration
from core.models.same_configuration import configuration, why_not_same


def written(directory: Path, like: Path, **changes: Any) -> Path:
    entries = json.loads((like / "config.json").read_text()) | changes
    kept = {name: value for name, value in entries.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, None),
        ({"transformers_version": "9.9", "use_cache": False, "_name_or_path": "x", "torch_dtype": "bfloat16"}, None),
        ({"eos_token_id": [1, 2]}, None),
        ({"attention_bias": ...}, None),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, that of the served one 2"),
        ({"hidden_act": "relu"}, "hidden_act 'relu', that of the served one 'silu'"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps 0.5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "dtype": "bfloat16"}}, None),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta 5.0, that of the",
        ),
        ({"bos_token_id": 5}, "bos_token_id 5"),
        ({"x" * 999: 1}, "x" * 300),
    ],
)
def test_the_first_entry_that_differs_is_named(
    changes: dict[str, Any], told: str | None, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    served = configuration(checkpoint_of("llama"))
    found = why_not_same(served, written(tmp_path, checkpoint_of("llama"), **changes))
    assert found is None if told is None else found is not None and found.startswith(told) and len(found) <= 300


def test_the_token_of_padding_counts_where_it_is_read(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    served = configuration(checkpoint_of("llama"))
    directory = written(tmp_path, checkpoint_of("llama"), pad_token_id=7, eos_token_id=5)
    assert why_not_same(served, directory) is None
    assert (why_not_same(served, directory, reads_padding=True) or "").startswith("pad_token_id 7")


def test_what_was_emulated_fits_anything_and_nothing_fits_no_file(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    assert configuration(tmp_path) == {}
    assert why_not_same({}, tmp_path) is None
    with pytest.raises(ModelLoadError, match=r"^the directory has no config.json, so it holds no checkpoint$"):
        why_not_same(configuration(checkpoint_of("llama")), tmp_path)


def test_what_cannot_be_read_is_one_line(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    served = configuration(checkpoint_of("llama"))
    with pytest.raises(ModelLoadError) as refused:
        why_not_same(served, written(tmp_path, checkpoint_of("llama"), model_type="nothing-known"))
    assert len(refused.value.message) <= 320


def test_numbers_are_compared_before_anything_is_made(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration of a billion layers lists them all as soon as it is one."""
    served = configuration(checkpoint_of("gemma3_text"))
    directory, made = written(tmp_path, checkpoint_of("gemma3_text"), num_hidden_layers=10**9), list[Path]()
    monkeypatch.setattr(same_configuration, "configuration", lambda where: made.append(where) or served)
    assert why_not_same(served, directory) == "num_hidden_layers 1000000000, that of the served one 4"
    assert not made
