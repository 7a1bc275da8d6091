"""Trials in compiled code: the arrays of `Trial`, at a tenth of what numpy's calls take for so few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.speculation.drafter import Drafts
from core.speculation.trial import Trial, Verdict
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class CompiledTrial(Trial):
    """A `Trial` that compiled code has laid out, and judges."""

    module: Any
    """See `core.native.host`."""

    @classmethod
    def laid_out(
        cls, module: Any, newest: Ints, lens: Ints, drafts: Drafts, room: Ints, vocab_size: int
    ) -> CompiledTrial:
        """As `Trial.of`, by `module`."""
        found = module.lay_out(newest, lens, drafts.ids, drafts.lens, room, vocab_size)
        counts, starts, row_of, ids, positions = found
        return cls(lens, counts, starts, row_of, ids, positions, module)

    def judged(self, sampled: Ints, most: Ints | None = None) -> Verdict:
        """See `Trial`."""
        return Verdict(self, *self.module.judge(self.counts, self.ids, sampled, most))
