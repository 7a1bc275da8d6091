"""Two texts that a checkpoint joins, short or long: the ways to encode them differ in what they hold up, not in ids."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.text.tokenizer import Tokenizer
from tests.support.encoders import make_encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("second", ["", "the dog", "the dog " * 100])
@pytest.mark.parametrize("first", ["a fox", "a fox " * 100])
def test_pairs_of_any_length_are_joined_alike(directory: Path, first: str, second: str) -> None:
    want = AutoTokenizer.from_pretrained(directory)([first], [second], return_token_type_ids=True)
    found = Tokenizer.load(directory).encode_pair(first, second)
    assert found == (want["input_ids"][0], want["token_type_ids"][0])


@pytest.mark.parametrize(("first", "second", "batches"), [(1, 256, 1), (256, 1, 1), (257, 0, 1), (128, 128, 0)])
def test_what_is_long_together_lets_go_of_the_interpreter(
    directory: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, batches: int
) -> None:
    """The other call of the library would hold up every thread of the process."""
    tokenizer, calls = Tokenizer.load(directory), list[Any]()
    inner: Any = tokenizer.backend

    def batch(given: Any, **named: Any) -> Any:
        calls.append(given)
        return inner.encode_batch_fast(given, **named)

    monkeypatch.setattr(tokenizer, "backend", SimpleNamespace(encode_batch_fast=batch, encode=inner.encode))
    tokenizer.encode_pair("a" * first, "b" * second)
    assert len(calls) == batches
