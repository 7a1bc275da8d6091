"""Tiny checkpoints with a classification head, and what transformers makes of texts by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from tests.support.checkpoints import BOS_ID, CONFIGS, EOS_ID, PAD_ID, RECURRENT_CONFIGS, tokenizer_of_tests


def make_judge(kind: str, directory: Path | str, labels: Sequence[str], seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of `kind` with a head for `labels` and its tokenizer to `directory`, and return that."""
    transformers_logging.disable_progress_bar()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    names = dict(enumerate(labels))
    config = AutoConfig.for_model(
        kind, **{**(CONFIGS | RECURRENT_CONFIGS).get(kind, {}), **ids, **overrides}, id2label=names
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
    model.save_pretrained(path)
    tokenizer_of_tests().save_pretrained(path)
    return path


@torch.no_grad()
def judged_by_hand(directory: Path, prompts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """float32[L] of each prompt, as transformers gives them one at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    return [model(input_ids=torch.tensor([prompt])).logits[0].float().numpy() for prompt in prompts]


def change_config(directory: Path, **fields: Any) -> None:
    """Set `fields` of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
