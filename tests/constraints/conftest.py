"""The small tokenizer that the tests of the engine have."""

from __future__ import annotations

from tests.engine import conftest as engine

tokenizer = engine.tokenizer
served_tokenizer = engine.tokenizer
