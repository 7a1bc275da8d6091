"""Marks a saved checkpoint: greedy answers to prompts whose right answer is known.

Everything is loaded from the folder, so what is marked is what was written: weights already rounded
to the stored type, and the tokenizer and the stop token as a server will find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from core.models.bundled.corpus import OPERANDS, documents_of, held_out_sums, sum_prompt

EVALUATION_SEED = 990_017  # far from any training seed
BATCH = 256


def load(folder: Path, dtype: torch.dtype) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer of a checkpoint folder, read from disk only."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), tokenizer


def chat_prompt(tokenizer: PreTrainedTokenizerFast, user: str, system: str = "") -> str:
    """A rendered chat with one user message, ready for the assistant's turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return rendered.removeprefix(str(tokenizer.bos_token))  # the tokenizer adds it again


@torch.inference_mode()
def greedy_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    max_new_tokens: int = 8,
) -> list[str]:
    """What the model writes after each prompt, stop token included, so that a missing one shows."""
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(list(prompts[start : start + BATCH]), return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        written = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        answers += [text.replace(str(tokenizer.pad_token), "") for text in written]
    return answers


def right_sums(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[tuple[int, int]],
    chat: bool = False,
) -> int:
    """How many sums come back right: the exact digits, then the stop token, then nothing."""
    prompts = [sum_prompt(a, b) for a, b in pairs]
    if chat:
        prompts = [chat_prompt(tokenizer, prompt) for prompt in prompts]
    answers = greedy_answers(model, tokenizer, prompts)
    wanted = [f"{a + b}{tokenizer.eos_token}" for a, b in pairs]
    return sum(got == want for got, want in zip(answers, wanted, strict=True))


def right_lookups(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, kind: str, count: int) -> int:
    """How many fresh prompts of a kind with one right answer ("recall", "copy"), in plain form."""
    turns = [found.turns[0] for found in islice(documents_of(kind, EVALUATION_SEED), count)]
    answers = greedy_answers(model, tokenizer, [turn.prompt for turn in turns], 80)
    wanted = [f"{turn.answer}{tokenizer.eos_token}" for turn in turns]
    return sum(got == want for got, want in zip(answers, wanted, strict=True))


def report(folder: Path) -> list[str]:
    """One line per mark, for both types that a server may load the weights in."""
    held_out = held_out_sums()
    everything = [(a, b) for a in OPERANDS for b in OPERANDS]
    lines: list[str] = []
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model, tokenizer = load(folder, dtype)
        plain = right_sums(model, tokenizer, held_out)
        chat = right_sums(model, tokenizer, held_out, chat=True)
        every = right_sums(model, tokenizer, everything)
        recalls = right_lookups(model, tokenizer, "recall", 200)
        copies = right_lookups(model, tokenizer, "copy", 200)
        lines.append(
            f"{name}: held-out sums {plain}/{len(held_out)} plain, {chat}/{len(held_out)} chat; "
            f"all sums {every}/{len(everything)}; recall {recalls}/200; copy {copies}/200"
        )
    return lines
