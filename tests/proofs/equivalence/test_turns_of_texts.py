"""Texts of a request wait in the line of its tenant, and take no turn of another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.engine.workers import Workers
from tests.proofs.equivalence.test_embeddings import embed, engine


async def test_texts_wait_in_the_line_of_their_tenant(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, run = list[str](), Workers.run

    async def noted(self: Workers, function: Any, *args: Any, caller: str = "", long: bool = False) -> Any:
        callers.append(caller)
        return await run(self, function, *args, caller=caller, long=long)

    monkeypatch.setattr(Workers, "run", noted)
    async with engine(checkpoint_of("llama")) as made:
        await embed(made, "the fox " * 60, "a dog", tenant="a")
    assert callers == ["a"]
