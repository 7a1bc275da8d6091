"""What a drafter was told while no drafts were wanted: kept until it is noted, and not for ever."""

from __future__ import annotations

import sys

import numpy as np

from core.speculation.drafter import Ran
from core.speculation.suffix_drafter import MOST_UNHEARD, SuffixDrafter


def test_no_more_is_kept_than_is_noted_together() -> None:
    drafter, tokens = SuffixDrafter(1 << 20, 4), np.arange(64)
    held = sys.getrefcount(tokens)
    for step in range(1, 3 * MOST_UNHEARD // 64):
        drafter.hear(Ran(np.array([1]), np.array([64 * step]), np.array([64]), tokens))
        assert sys.getrefcount(tokens) - held == step % (MOST_UNHEARD // 64)
