"""PEFT itself: makes random adapters of a checkpoint, and says what it generates with one of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ADAPTERS: dict[str, dict[str, Any]] = {
    "narrow": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "regex": {"r": 4, "lora_alpha": 6, "target_modules": r".*\.(up_proj|down_proj|o_proj)"},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "layers_to_transform": [1],
        "rank_pattern": {"k_proj": 6, r"1\.mlp\.gate_proj": 3},
        "alpha_pattern": {"q_proj": 12},
    },
}
"""By name the arguments of `LoraConfig`: ranks, targets, scalings and patterns all differ."""


def make_adapter(base: Path, directory: Path, seed: int, **arguments: Any) -> Path:
    """Save a random adapter of the checkpoint `base`, as PEFT writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **arguments))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(std=0.2)
        adapted.save_pretrained(str(directory))
    return directory


class PeftOracle:
    """The base with all `adapters` loaded by PEFT, by name."""

    def __init__(self, base: Path, adapters: dict[str, Path]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
            model.generation_config.eos_token_id = None
            # Packed layers of compressed-tensors have a weight for PEFT to see from their first call on.
            model(torch.tensor([[1]]))
            (first, path), *others = adapters.items()
            self._model: Any = PeftModel.from_pretrained(model, str(path), adapter_name=first).eval()
            for name, each in others:
                self._model.load_adapter(str(each), adapter_name=name)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], adapter: str | None, count: int) -> list[int]:
        """`count` tokens after `prompt`; None is the base alone."""
        ids = torch.tensor([list(prompt)])
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if adapter is None:
                with self._model.disable_adapter():
                    answer = self._model.generate(input_ids=ids, **options)
            else:
                self._model.set_adapter(adapter)
                answer = self._model.generate(input_ids=ids, **options)
        return answer[0, len(prompt) :].tolist()
