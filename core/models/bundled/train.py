"""Trains the bundled checkpoint from nothing but this repository's own text.

    python -m core.models.bundled.train --steps 200 --out /tmp/trial   # a minute, to see it move
    python -m core.models.bundled.train                                # the real thing

The run writes a complete Hugging Face folder and then marks what it wrote (see `evaluate`).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from core.models.bundled import bundled_model_dir
from core.models.bundled.evaluate import report
from core.models.bundled.packing import Batch, Packer
from core.models.bundled.tokenization import MAX_POSITIONS, build_tokenizer

STEPS = 3_000
SEED = 1
ROWS = 8
PEAK_RATE = 2e-3
WARMUP_STEPS = 100
# About 1 / sqrt(hidden size).  At the customary 0.02 a model this narrow spends most of the run on
# growing its weights: after 800 steps it added 18 % of held-out pairs, against 96 % from 0.06.
INITIAL_SPREAD = 0.07
FINAL_SHARE = 0.01  # of the peak rate, at the last step
WEIGHT_DECAY = 0.1


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama, small enough for two CPU cores and large enough to learn carrying."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIAL_SPREAD,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    norms = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross-entropy of each next token, averaged by the batch's weights.

    The forward pass may compute in bfloat16; the weights and the loss stay in float32.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask())
    logits = output.logits[:, :-1].float()
    targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> LlamaForCausalLM:
    """The training loop; the same seed and machine give the same weights."""
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    model.train()
    optimizer = build_optimizer(model)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    began, recent = time.monotonic(), 0.0
    for step, batch in enumerate(Packer(tokenizer, seed, ROWS)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = loss.item() if step == 0 else 0.95 * recent + 0.05 * loss.item()
        if step % 50 == 0 or step + 1 == steps:
            spent = time.monotonic() - began
            print(f"step {step:5d}  loss {recent:.4f}  {spent:6.0f} s", flush=True)
        if step + 1 == steps:
            break
    model.eval()
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the whole checkpoint; the weights are rounded to bfloat16 here."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def parse_arguments() -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        prog="python -m core.models.bundled.train",
        description="Train the bundled checkpoint (a small Llama that adds, recalls and tells "
        "stories) on text that this repository generates. Needs a CPU and no network.",
        epilog="example: --steps 200 --out /tmp/trial makes a quick, untaught model to check that "
        "everything runs. Without --out the checkpoint in the repository is replaced, and every "
        "recorded output of it with it. The rate's schedule stretches with --steps.",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and text (%(default)s)")
    # One thread: the matrices are small, and two threads that wait for each other on a busy machine
    # are slower than one that waits for no other.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--out", type=Path, default=bundled_model_dir(), help="folder to write (the bundled one)")
    return parser.parse_args()


def main() -> None:
    """Train, save, mark."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = build_tokenizer()
    model = train(tokenizer, arguments.steps, arguments.seed)
    save(model, tokenizer, arguments.out)
    for line in report(arguments.out):
        print(line, flush=True)


if __name__ == "__main__":
    main()
