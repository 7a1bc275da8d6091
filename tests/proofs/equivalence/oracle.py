"""What `transformers` says: greedy outputs of `generate`, and how close each of its decisions was."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.proofs.equivalence.references import references
from tests.support.checkpoints import VOCAB_SIZE

MARGIN = 1e-3
"""Top-1 minus top-2 logit below which the oracle itself is undecided: float32 sums in another order differ by 1e-6 to
1e-5 of the logits' scale. Prompts that meet such a tie are left out, by the oracle alone, before we are asked."""

OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class Example:
    """A prompt and the greedy continuation that `transformers` gives it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def make_prompts(count: int, longest: int, seed: int) -> list[tuple[int, ...]]:
    """Random ids of 1 to `longest` tokens, both included; every third begins like an earlier one."""
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(int(longest ** rng.random()) for _ in range(count - 3))]
    prompts: list[tuple[int, ...]] = []
    for number, length in enumerate(lengths):
        own = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))
        if number > 3 and number % 3 == 0:
            older = rng.choice(prompts)
            own = (*older[: rng.randrange(len(older) + 1)], *own)[:longest]
        prompts.append(own)
    return prompts


def decided_examples(directory: Path, count: int, longest: int, seed: int) -> list[Example]:
    """`count` examples whose every token `transformers` chose by more than MARGIN, one of 1 and one of `longest`."""
    kept = decided(directory, make_prompts(count + count // 3, longest, seed))[:count]
    assert len(kept) == count, f"only {len(kept)} of {count} prompts are decided: make the weights less flat"
    assert {1, longest} <= {len(example.prompt) for example in kept}
    return kept


def decided(directory: Path, prompts: list[tuple[int, ...]]) -> list[Example]:
    """Those of `prompts` whose every token `transformers` chose by more than MARGIN. EOS is a token like any other."""
    question = ["greedy", OUTPUT_TOKENS, MARGIN, prompts]
    outputs = references().outputs(directory, question, lambda: _greedy(directory, prompts))
    return [Example(prompt, tuple(o)) for prompt, o in zip(prompts, outputs, strict=True) if o is not None]


@torch.no_grad()
def _greedy(directory: Path, prompts: list[tuple[int, ...]]) -> list[list[int] | None]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    outputs: list[list[int] | None] = []
    for prompt in prompts:
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(answer.logits).topk(2).values
        is_decided = float((best[:, 0] - best[:, 1]).min()) > MARGIN
        outputs.append(answer.sequences[0, len(prompt) :].tolist() if is_decided else None)
    return outputs
