"""Weights by the name of a branch are the same for all engines: the commit that came."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.types.control import WeightSource
from tests.unit.service.replicas.fakes import engines, fakes

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("folder", "asked"), [(COMMIT, f"org/new@{COMMIT}"), ("plain", "org/new@main")], ids=["snapshot", "directory"]
)
async def test_engines_are_asked_for_the_commit(folder: str, asked: str) -> None:
    async with fakes() as rig:
        rig.replicas.control.fetch_by(lambda _: Path("/cache") / folder)
        await rig.replicas.control.update_weights(WeightSource(name="org/new@main"), "second")
        assert [each.control.updates[-1].name for each in engines(rig)] == [asked] * 2
