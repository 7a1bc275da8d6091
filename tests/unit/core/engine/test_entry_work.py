"""What a request costs the event loop when it enters: its outputs share one prompt, however long that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from core.text.detokenizer import MAX_CONTEXT
from core.text.tokenizer import Tokenizer
from service.bench.emulated import EmulatedModel
from tests.unit.core.engine.emulation import HookedModel, ask, running

OUTPUTS = 16


@contextmanager
def converted() -> Iterator[list[int]]:
    """Sizes of the arrays that this thread makes lists of."""
    sizes: list[int] = []

    def on_call(frame: FrameType, event: str, function: object) -> None:
        array = getattr(function, "__self__", None)
        if event == "c_call" and isinstance(array, np.ndarray) and function.__name__ == "tolist":  # type: ignore[attr-defined]
            sizes.append(array.size)

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield sizes
    finally:
        sys.setprofile(before)


async def test_outputs_of_a_long_prompt_convert_only_the_end_of_it(tokenizer: Tokenizer) -> None:
    length = 20_000
    model = HookedModel(tokenizer)
    EmulatedModel.__init__(model, model.timeline, tokenizer.vocab_size, 2 * length)
    async with running(tokenizer, model, max_total_tokens=2 * length, max_running_requests=OUTPUTS) as engine:
        prompt = tuple(3 + place % 200 for place in range(length))
        with converted() as sizes:
            stream = await engine.generate(ask(prompt, n=OUTPUTS, want_text=True))
        await stream.aclose()
    assert len(sizes) >= OUTPUTS, "the detokenizers were made here"
    assert sum(sizes) <= OUTPUTS * MAX_CONTEXT
