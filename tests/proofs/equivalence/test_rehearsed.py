"""Models that keep more than keys are rehearsed too: their prompts on padding, which leaves nothing for a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.executor.rehearsal import ENCODER_TOKENS
from core.memory.companion import Rehearsed
from core.memory.cross.cross_pages import CROSS
from core.memory.recurrent.state_slots import NAME as STATES
from core.models.encoder_decoder.backend import EncoderDecoderModel
from core.models.hf.backend import TransformersModel
from tests.proofs.equivalence.test_decode_graphs import answer, graph_engine
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.fakes.masked_attention import MaskedAttention

STEPS = [[], [5], [3, 1, 1]]
PROMPT = (5, 9, 4, 7)


class Seen:
    """What models are asked for on padding: the prompts of each step, and how many tokens its encoder inputs have."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[list[int], int]] = []
        for model in (TransformersModel, EncoderDecoderModel):
            patch.setattr(model, "forward", self._watching(model.forward))

    def _watching(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(model: Any, batch: Any) -> torch.Tensor:
            inputs = 0 if batch.encoder_ids is None else len(batch.encoder_ids)
            # Proofs at load have rows of their own.
            if not batch.rows.any():
                self.steps.append((batch.extend_lens_host.tolist() if batch.num_extend else [], inputs))
            return forward(model, batch)

        return watched


@pytest.mark.parametrize("kind", ["lfm2", "jamba", "t5", "bart"])
async def test_prompts_leave_nothing_behind(
    kind: str, tmp_path: Path, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    encodes = kind in ("t5", "bart")
    directory = make_encoder_decoder(kind, tmp_path, seed=0) if encodes else checkpoint_of(kind)
    outputs = []
    memory: dict[str, Any] = {"max_encoder_tokens": 200} if encodes else {}
    for steps in ([], STEPS):
        monkeypatch.setattr(MaskedAttention, "rehearsals", lambda *_, steps=steps: steps)
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            seen = Seen(patch)
            async with graph_engine(directory, patch, overlap=True, **memory) as (engine, _, runner):
                begun = [(lens, ENCODER_TOKENS if lens and encodes else 0) for lens in steps]
                assert seen.steps[: len(steps)] == begun
                companion: Any = runner.state.companions[CROSS if encodes else STATES]
                assert isinstance(companion, Rehearsed)
                if encodes:
                    assert not companion.table.any() and companion.lens[0] == 1 and not companion.lens[1:].any()
                else:
                    assert not companion.mapping.any()
                    held = [companion.states.conv(each.layer_id) for each in companion.states.layers]
                    assert not any(states[1:].any() for states in held)
                assert sum(engine.stats.assert_failures.values()) == 0
                outputs.append(await answer(engine, PROMPT))
    assert outputs[0] == outputs[1]
    assert "compiled by the first steps" not in caplog.text and "rehearsed 3 steps" in caplog.text
