"""The tokenizer that the emulated model borrows."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.text.tokenizer import Tokenizer
from tests.fakes.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=0)
    return Tokenizer.load(directory)
