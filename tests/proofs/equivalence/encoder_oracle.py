"""What `transformers.generate` says of encoder-decoders: greedy outputs after the decoder's start token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from tests.proofs.equivalence.oracle import MARGIN, OUTPUT_TOKENS, Example
from tests.proofs.equivalence.references import references
from tests.support.checkpoints import VOCAB_SIZE


def make_inputs(count: int, longest: int, seed: int) -> list[tuple[int, ...]]:
    """Random ids of 1 to `longest` tokens, both included."""
    draw = random.Random(seed)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    return [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in lengths]


@dataclass(frozen=True)
class Seq2SeqOracle:
    """The plain model of `directory`. `generate` gets `options` beside greedy search and the number of tokens."""

    directory: Path

    def examples(self, inputs: list[tuple[int, ...]], **options: Any) -> list[Example]:
        """Inputs whose every free token was chosen by more than MARGIN, with their outputs.

        EOS is a token like any other unless `options` name it.
        """
        question = ["encoder-decoder", OUTPUT_TOKENS, MARGIN, inputs, options]
        outputs = references().outputs(self.directory, question, lambda: self._greedy(inputs, options))
        return [Example(ids, tuple(o)) for ids, o in zip(inputs, outputs, strict=True) if o is not None]

    @torch.no_grad()
    def _greedy(self, inputs: list[tuple[int, ...]], options: dict[str, Any]) -> list[list[int] | None]:
        model = AutoModelForSeq2SeqLM.from_pretrained(self.directory, dtype=torch.float32, attn_implementation="eager")
        model.eval()
        model.generation_config.eos_token_id = None
        outputs: list[list[int] | None] = []
        for ids in inputs:
            answer = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                **{"max_new_tokens": OUTPUT_TOKENS, "num_beams": 1, "do_sample": False, "pad_token_id": 0, **options},
                output_scores=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(answer.scores).topk(2).values
            is_decided = float((best[:, 0] - best[:, 1]).min()) > MARGIN
            outputs.append(answer.sequences[0, 1:].tolist() if is_decided else None)
        return outputs

    def decided(self, count: int, longest: int, seed: int) -> list[Example]:
        """`count` decided examples, inputs of one and of `longest` tokens among them."""
        found = self.examples(make_inputs(count + count // 3, longest, seed))
        assert len(found) >= count, f"only {len(found)} of {count} inputs are decided: make the weights less flat"
        assert {1, longest} <= {len(example.prompt) for example in found[:count]}
        return found[:count]
