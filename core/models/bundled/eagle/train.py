"""Trains the bundled model's EAGLE-3 head on what that model says.

    python -m core.models.bundled.eagle.train --steps 50 --out /tmp/trial   # to see it move
    python -m core.models.bundled.eagle.train                               # the real thing

Each step unrolls the head as it will be used ("training-time test"): a first round on true features of the target, then
rounds that feed on the head's own output. Its loss is the cross-entropy with the target's whole distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.bundled.eagle.evaluate import report
from core.models.bundled.eagle.head import FEATURE_LAYERS, Head, Past, features
from core.models.bundled.eagle.texts import all_texts, batches
from core.models.bundled.evaluate import load
from core.models.bundled.packing import UNUSED, Batch

STEPS = 1_000
SEED = 1
ROWS = 8
ROUNDS = 4
ROUND_WEIGHT = 0.85
"""Of each round against the one before."""
PEAK_RATE = 2e-3
WARMUP_STEPS = 60
FINAL_SHARE = 0.01
WEIGHT_DECAY = 0.05
INITIAL_SPREAD = 0.05


def build_head(model: LlamaForCausalLM, seed: int) -> Head:
    """A fresh head that passes the target's last layer on and ends as the target does."""
    torch.manual_seed(seed)
    head = Head(model.config)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, INITIAL_SPREAD)
        hidden = model.config.hidden_size
        head.fc.weight.mul_(0.2)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.norm.weight.copy_(model.model.norm.weight)
        head.lm_head.weight.copy_(model.lm_head.weight)
    return head


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def shifted(values: torch.Tensor, by: int, fill: float) -> torch.Tensor:
    """`values` [B, L, ...] with place p holding what stood at p + `by`; `fill` where nothing did."""
    out = torch.full_like(values, fill)
    out[:, : values.shape[1] - by] = values[:, by:]
    return out


def target_pass(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [B, L, 3 H] and logits [B, L, V] of the target, without gradients."""
    caught = list[torch.Tensor]()
    # transformers gives the last hidden state after the final norm; the head wants the stream itself.
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask(), output_hidden_states=True)
    hook.remove()
    states = [*output.hidden_states[:-1], caught[0]]
    return features(states).float().clone(), output.logits.float().clone()


def batch_loss(model: LlamaForCausalLM, head: Head, batch: Batch) -> tuple[torch.Tensor, list[float]]:
    """The weighted loss of all rounds, and of each round how often the head's first choice was the target's."""
    raw, logits = target_pass(model, batch)
    goals = logits.softmax(-1)
    best = logits.argmax(-1)
    past = Past(batch.attention_mask())
    positions = torch.arange(batch.tokens.shape[1])
    total, right = torch.zeros(()), list[float]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        feature = head.fc(raw).float()
        for behind in range(ROUNDS):
            seen = shifted(batch.segments, behind + 1, UNUSED) == batch.segments
            weights = shifted(batch.weights, behind + 2, 0.0) * seen * (batch.segments != UNUSED)
            weights *= shifted(batch.segments, behind + 2, UNUSED) == batch.segments
            embedded = model.model.embed_tokens(shifted(batch.tokens, behind + 1, 0)).detach()
            feature = head.midlayer(embedded, feature, positions + behind, past)
            chosen = weights > 0
            said = head.logits(feature[chosen]).float()
            wanted = shifted(goals, behind + 1, 0.0)[chosen]
            losses = functional.cross_entropy(said, wanted, reduction="none")
            scale = weights[chosen]
            total = total + ROUND_WEIGHT**behind * (losses * scale).sum() / scale.sum()
            hits = said.argmax(-1) == shifted(best, behind + 1, 0)[chosen]
            right.append(float((hits * scale).sum() / scale.sum()))
    return total, right


def train(
    model: LlamaForCausalLM, head: Head, texts: list[tuple[list[int], list[float]]], steps: int, seed: int
) -> None:
    """The training loop; the same seed and machine give the same weights."""
    matrices = [weight for weight in head.parameters() if weight.ndim >= 2]
    norms = [weight for weight in head.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.95),
    )
    began = time.monotonic()
    for step, batch in zip(range(steps), batches(texts, ROWS, seed + 1)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss, right = batch_loss(model, head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step + 1 == steps:
            hits = " ".join(f"{part:.3f}" for part in right)
            print(
                f"step {step:5d}  loss {loss.item():.4f}  right {hits}  {time.monotonic() - began:6.0f} s", flush=True
            )


def save(model: LlamaForCausalLM, head: Head, folder: Path) -> None:
    """Write the head's folder; the weights are rounded to bfloat16 here."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape: Any = model.config
    taken = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(shape, name) for name in taken},
        "hidden_act": "silu",
        "vocab_size": model.config.vocab_size,
        "draft_vocab_size": model.config.vocab_size,
        "max_position_embeddings": model.config.max_position_embeddings,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        prog="python -m core.models.bundled.eagle.train",
        description="Train the EAGLE-3 head of the bundled checkpoint on what that checkpoint says.",
        epilog="Without --out the head in the repository is replaced.",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and text (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--out", type=Path, default=bundled_head_dir(), help="folder to write (the bundled one)")
    return parser.parse_args()


def main() -> None:
    """Train, save, mark."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(bundled_model_dir(), torch.float32)
    began = time.monotonic()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        texts = all_texts(model, tokenizer, arguments.seed)
    print(
        f"{len(texts)} texts, {sum(len(ids) for ids, _ in texts):,} tokens, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    head = build_head(model, arguments.seed)
    print(f"{sum(weight.numel() for weight in head.parameters()):,} parameters", flush=True)
    train(model, head, texts, arguments.steps, arguments.seed)
    save(model, head, arguments.out)
    for line in report(arguments.out):
        print(line, flush=True)


if __name__ == "__main__":
    main()
