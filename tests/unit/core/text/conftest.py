"""One tokenizer of each family, trained once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.text.tokenizer import Tokenizer
from tests.unit.core.text.checkpoints import FAMILIES


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories by family name."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: make(root / name) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def tokenizers(families: dict[str, Path]) -> dict[str, Tokenizer]:
    """Loaded tokenizers by family name."""
    return {name: Tokenizer.load(path) for name, path in families.items()}


@pytest.fixture
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """The family that most served models use."""
    return tokenizers["byte_level"]
