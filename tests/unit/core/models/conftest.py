"""Checkpoints that the tests of models load, and the tokenizer of the bundled one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.models.bundled import bundled_model_dir
from core.models.native import extension as native
from core.models.products import extension as products
from core.native.kept_library import ExtensionUnavailable
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Path]:
    """checkpoint(kind) -> directory, read-only; a test that changes files makes its own."""
    return checkpoint_of


@pytest.fixture
def shaped(tmp_path: Path) -> Callable[..., Path]:
    """shaped(**config) -> directory: a Llama whose layers have those sizes."""
    return lambda **shape: make_checkpoint("llama", tmp_path / "model", max_position_embeddings=512, **shape)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """As `transformers` reads it from the bundled checkpoint."""
    return AutoTokenizer.from_pretrained(bundled_model_dir(), local_files_only=True)


@pytest.fixture(scope="session")
def native_code() -> Any:
    """The compiled decoder; skips tests of it where no compiler is."""
    return _compiled(native.load_extension)


@pytest.fixture(scope="session")
def products_code() -> Any:
    """The compiled products; skips tests of them where no compiler is."""
    return _compiled(products.load_extension)


def _compiled(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
