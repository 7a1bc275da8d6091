"""The tokenizer that the emulated model borrows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoint_of: Callable[[str], Path]) -> Tokenizer:
    """A small one: of 320 tokens."""
    return Tokenizer.load(checkpoint_of("llama"))
