"""How the bundled model's draft head was trained and is marked: what it never reads, and how its drafts are counted."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from core.models.bundled.eagle.evaluate import Story, accepted_lengths
from core.models.bundled.eagle.texts import HELD_OUT, held_out_prompts, training_documents
from core.models.bundled.eagle.train import FINAL_SHARE, PEAK_RATE, WARMUP_STEPS, learning_rate


def test_no_text_is_about_a_held_out_pair(seed: int) -> None:
    held_out = held_out_prompts()
    assert len(set(held_out)) == HELD_OUT == len(held_out)
    prompts = {turn.prompt for found in islice(training_documents("story", seed), 600) for turn in found.turns}
    assert len(prompts) > HELD_OUT and prompts.isdisjoint(held_out)


def test_the_rate_rises_to_its_peak_and_falls_to_its_end() -> None:
    rates = [learning_rate(step, 400) for step in range(401)]
    assert rates[WARMUP_STEPS - 1] == pytest.approx(PEAK_RATE) == pytest.approx(max(rates))
    assert rates[:WARMUP_STEPS] == sorted(rates[:WARMUP_STEPS])
    assert rates[WARMUP_STEPS:] == sorted(rates[WARMUP_STEPS:], reverse=True)
    assert rates[400] == pytest.approx(PEAK_RATE * FINAL_SHARE)


@pytest.mark.parametrize(("most", "lengths"), [(0, [1] * 9), (2, [3, 3, 3]), (5, [6, 3]), (9, [6, 3])])
def test_a_step_brings_its_right_drafts_and_one_more(most: int, lengths: list[int]) -> None:
    """12 tokens, 2 of them the prompt, and five right drafts behind each; the first token comes with the prompt."""
    story = Story(torch.arange(12), 2, torch.zeros(12), 0.0)
    assert accepted_lengths(story, [5] * 12, most) == lengths
