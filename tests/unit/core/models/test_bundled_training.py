"""What the bundled checkpoint is trained on and marked by: a fault here would be taught, or would flatter the model."""

from __future__ import annotations

import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.models.bundled.evaluate import right_sums
from core.models.bundled.packing import ANSWER_WEIGHTS, PROMPT_WEIGHT, ROW_TOKENS, UNUSED, Batch, Packer
from core.models.bundled.story import ANIMALS, NAMES, story_prompt_and_text
from core.models.bundled.train import (
    FINAL_SHARE,
    PEAK_RATE,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    batch_loss,
    build_model,
    build_optimizer,
    learning_rate,
)


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> Batch:
    return next(iter(Packer(tokenizer, seed=3, rows=6)))


def places(batch: Batch) -> list[tuple[int, torch.Tensor]]:
    """Row and positions of every document."""
    return [
        (row, (batch.segments[row] == number).nonzero().flatten())
        for row in range(len(batch.segments))
        for number in range(int(batch.segments[row].max()) + 1)
    ]


def test_a_document_sees_itself_up_to_each_token_and_no_other(batch: Batch) -> None:
    mask, found = batch.attention_mask()[:, 0], places(batch)
    assert len(found) > 2 * len(batch.tokens), "several share a row"
    for row, own in found:
        assert (own.diff() == 1).all()
        others = (batch.segments[row] != batch.segments[row, own[0]]).nonzero().flatten()
        assert not mask[row][own][:, others].any()
        assert torch.equal(mask[row][own][:, own], torch.ones(len(own), len(own), dtype=torch.bool).tril())


def test_answers_weigh_more_than_prompts_and_first_tokens_and_padding_nothing(batch: Batch, tokenizer: Any) -> None:
    answers = set(ANSWER_WEIGHTS.values())
    for row, own in places(batch):
        weights = batch.weights[row, own]
        assert weights[0] == 0.0, "the document before would have to guess it"
        assert {round(weight, 6) for weight in weights[1:].tolist()} <= {PROMPT_WEIGHT, *answers}
        assert batch.tokens[row, own[-1]] == tokenizer.eos_token_id and weights[-1].item() in answers
    unused = batch.segments == UNUSED
    assert unused.any() and (batch.tokens[unused] == tokenizer.pad_token_id).all()
    assert not batch.weights[unused].any()
    assert batch.tokens.shape == (6, ROW_TOKENS)


def test_a_stream_of_batches_repeats_no_document_and_loses_few(tokenizer: Any) -> None:
    batches = list(islice(Packer(tokenizer, seed=3, rows=2), 3))
    starts = [tuple(each.tokens[row, own].tolist()) for each in batches for row, own in places(each)]
    long = [each for each in starts if len(each) > 30]
    assert len(long) == len(set(long)) > 5
    filled = sum((each.segments != UNUSED).sum().item() for each in batches)
    assert filled > 0.5 * 6 * ROW_TOKENS


class Foreseeing:
    """Knows each next token of `sure` places, and is as sure of a wrong one elsewhere."""

    def __init__(self, sure: torch.Tensor, vocab: int) -> None:
        self.sure, self.vocab = sure, vocab

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        following = input_ids.roll(-1, dims=1)
        chosen = torch.where(self.sure.roll(-1, dims=1), following, (following + 1) % self.vocab)
        return SimpleNamespace(logits=100.0 * torch.nn.functional.one_hot(chosen, self.vocab).float())


def test_the_loss_is_of_next_tokens_by_their_own_weights(batch: Batch) -> None:
    vocab = int(batch.tokens.max()) + 2
    weighed = Foreseeing(batch.weights > 0, vocab)
    assert batch_loss(weighed, batch) == pytest.approx(0.0)  # type: ignore[arg-type]
    answers = batch.weights[:, 1:] > PROMPT_WEIGHT
    share = (batch.weights[:, 1:] * answers).sum() / batch.weights[:, 1:].sum()
    only_prompts = Foreseeing(batch.weights <= PROMPT_WEIGHT, vocab)
    assert batch_loss(only_prompts, batch).item() == pytest.approx(100 * share.item(), rel=1e-4)  # type: ignore[arg-type]


def test_the_rate_rises_to_its_peak_and_falls_to_its_end() -> None:
    rates = [learning_rate(step, 1000) for step in range(1001)]
    assert rates[0] == PEAK_RATE / WARMUP_STEPS
    assert rates[WARMUP_STEPS - 1] == rates[WARMUP_STEPS] == max(rates) == PEAK_RATE
    assert rates[-1] == pytest.approx(PEAK_RATE * FINAL_SHARE)
    assert sorted(rates[WARMUP_STEPS:], reverse=True) == rates[WARMUP_STEPS:]


def test_norms_are_not_decayed(tokenizer: Any) -> None:
    model = build_model(tokenizer)
    matrices, norms = build_optimizer(model).param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (WEIGHT_DECAY, 0.0)
    assert {weight.ndim for weight in norms["params"]} == {1}
    assert len(matrices["params"]) + len(norms["params"]) == len(list(model.parameters()))


def test_a_story_keeps_to_the_hero_and_the_animal_of_its_prompt() -> None:
    dice = random.Random(0)
    for _ in range(300):
        prompt, text = story_prompt_and_text(dice)
        hero, animal = prompt.removeprefix("A story about ").removesuffix(":").split(" the ")
        assert f"{animal} named {hero}" in text and text.endswith(f"The end. {ANIMALS[animal]}")
        friends = [name for name in NAMES if f"Then {hero} met {name} the " in text]
        assert len(friends) == 1 and friends != [hero], "the friend is another person"
        assert text[0] == " " and not prompt.endswith(" "), "the space is the answer's"


@pytest.mark.parametrize(
    ("answer", "right"),
    [("46<|eos|>", 1), ("46", 0), ("4", 0), ("461<|eos|>", 0), ("<|eos|>", 0), ("46<|eos|>46", 0), ("45<|eos|>", 0)],
)
def test_a_sum_is_right_with_its_digits_and_its_stop_and_nothing_else(tokenizer: Any, answer: str, right: int) -> None:
    class Scripted:
        def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            written = tokenizer.encode(answer, add_special_tokens=False)
            ids = torch.full((len(input_ids), 8), tokenizer.pad_token_id)
            ids[:, : len(written)] = torch.tensor(written)
            return torch.cat([input_ids, ids], dim=1)

    assert right_sums(Scripted(), tokenizer, [(12, 34)]) == right  # type: ignore[arg-type]
