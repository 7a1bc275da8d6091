"""An image that a vision tower fails at ends its own request: others find nothing of it, and no stream notices."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from core.engine.build import build_engine
from core.errors import RequestFailed
from core.models.vision.tower import VisionTower
from core.types.image import ReadImage
from tests.proofs.equivalence.image_oracle import ImageOracle, Seen
from tests.proofs.equivalence.test_images import OUTPUT, answer, config
from tests.support.engines import started
from tests.support.vision_checkpoints import make_vision_checkpoint, picture

KINDS = ("gemma4, both ways", "mistral3", "qwen3_5", "qwen3_vl")
"""Windows and experts, rows, states, features behind several layers."""


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize("kind", KINDS)
async def test_it_ends_its_request_alone(
    kind: str, native: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the tower can look at it, it is an image like any other."""
    oracle = ImageOracle(make_vision_checkpoint(kind, tmp_path / "seeing"))
    rng = random.Random(seed)
    bad, good = (oracle.prompt(rng, 9, picture(place), 21) for place in (11, 12))
    longer, text = Seen((*bad.ids, *bad.ids[:7]), bad.images), oracle.prompt(rng, 12)
    look, failing = VisionTower._seen, list[int]()

    def seen(tower: VisionTower, image: ReadImage) -> torch.Tensor:
        failing[:] = failing or [int(image.keys[0])]
        if int(image.keys[0]) in failing:
            raise IndexError("no such place")
        return look(tower, image)

    async with started(build_engine(config(tmp_path / "seeing", 400, 8, native))) as engine:
        alone = await answer(engine, text, 40)
        monkeypatch.setattr(VisionTower, "_seen", seen)
        asked = (answer(engine, each) for each in (bad, longer, good))
        beside, *failed, shown = await asyncio.gather(answer(engine, text, 40), *asked, return_exceptions=True)
        assert all(isinstance(each, RequestFailed) and "failed at an image" in str(each) for each in failed), failed
        assert not isinstance(beside, BaseException) and not isinstance(shown, BaseException)
        want = oracle.greedy(good, OUTPUT)
        assert beside[0] == alone[0] and shown[0][: len(want)] == want
        monkeypatch.setattr(VisionTower, "_seen", look)
        for each in (bad, longer):
            want = oracle.greedy(each, OUTPUT)
            assert (await answer(engine, each))[0][: len(want)] == want
