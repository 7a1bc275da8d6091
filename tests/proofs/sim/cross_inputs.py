"""What clients send to an encoder-decoder: inputs of ids that no decoder knows, through the production entry."""

from __future__ import annotations

import random

import numpy as np

from core.engine.encoder_input import EncoderInput
from core.engine.input_processor import InputProcessor
from core.memory.kv_pool import KVLayerSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.types.arrays import Ints
from core.types.io import GenerateRequest
from tests.proofs.sim.reference import VOCAB
from tests.proofs.sim.scenario import Cross, Scenario

SYMBOLS = 7
ENCODER_VOCAB = VOCAB + SYMBOLS
"""Those of an input are behind the decoder's, so that one among the other's ids is seen."""
TOO_LONG = 0.02
"""Share of inputs that no empty pool could hold, or that the encoder has no positions for."""


class CrossInputs:
    """Draws inputs, and knows what the door must make of them."""

    def __init__(self, scenario: Scenario, cross: Cross) -> None:
        self.cross = cross
        self.spec = EncoderSpec(
            cross.longest, (KVLayerSpec(0, 1, 1, 1),), cross.start_ids, cross.forced_first, cross.forced_last
        )
        self.entry = EncoderInput(self.spec, cross.longest)
        self.most = min(cross.longest, cross.pages * scenario.page_size)
        self._short = min(self.most, max(1, scenario.config.prompt_tokens // 2))

    def draw(self, rng: random.Random) -> list[int]:
        """Many that share a step, some that fill the pool or the encoder, a few that the door must refuse."""
        kind = rng.random()
        if kind < TOO_LONG:
            length = self.most + 1 + int(rng.random() * 4)
        elif kind < 0.1:
            length = self.most
        elif kind < 0.5:
            length = 1 + int(rng.random() * self._short)
        else:
            length = 1 + int(rng.random() ** 2 * self.most)
        return [VOCAB + int(rng.random() * SYMBOLS) for _ in range(length)]

    def fits(self, ids: list[int]) -> bool:
        """Whether the door must let them in."""
        return len(ids) <= self.most


def entered(entry: InputProcessor, request: GenerateRequest) -> Ints:
    """`prompt_ids` of ids, which it has no reason to wait for. Raises InvalidRequest."""
    steps = entry.prompt_ids(request)
    try:
        steps.send(None)
    except StopIteration as done:
        ids: Ints = np.asarray(done.value)
        return ids
    raise AssertionError("the entry waits for something, though the ids are there")
