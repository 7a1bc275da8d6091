"""A trained EAGLE-3 head for the bundled model, which drafts what that model is about to say.

`head` is the network, `texts` makes what it learns from, `train` trains and `evaluate` marks it; `checkpoint/` holds
the result. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled_head_dir"]


_FOLDER = Path(__file__).resolve().parent / "checkpoint"


def bundled_head_dir() -> Path:
    """Absolute path of the head's folder (config and weights)."""
    return _FOLDER
