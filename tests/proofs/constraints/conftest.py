"""The small tokenizer that the tests of the engine have."""

from __future__ import annotations

from tests.unit.core.engine import conftest as engine

tokenizer = engine.tokenizer
served_tokenizer = engine.tokenizer
