"""A small trained Llama checkpoint that ships with the repository.

A server can only be judged by its output if the output can be right or wrong.  Random weights
produce noise, where a wrong cache slot looks like a right one; this checkpoint adds two numbers,
so a wrong cache slot shows as a wrong sum.  `corpus` makes the text, `tokenization` the tokenizer,
`train` the weights and `evaluate` the marks; `checkpoint/` holds the result in Hugging Face form.

Importing this package loads nothing heavy: the weights are only a path until someone opens them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled_model_dir"]


def bundled_model_dir() -> Path:
    """Absolute path of the checkpoint folder (config, weights, tokenizer, chat template)."""
    return Path(__file__).resolve().parent / "checkpoint"
