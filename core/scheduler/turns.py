"""Whose turn it is when one step holds either prompt chunks or decodes (`--no-mixed-chunk`)."""

from __future__ import annotations

from core.config import PREFILLS_PER_DECODE


class Turns:
    """Chunks go first, as in SGLang, because they bring rows that decode together. Then decodes are owed one step.

    Both sides have a share. While prompts keep arriving, one step in `PREFILLS_PER_DECODE + 1` decodes and the others
    prefill. With nothing to decode every step prefills, with nothing to prefill every step decodes.
    """

    def __init__(self) -> None:
        self._prefills = 0

    @property
    def decode_owed(self) -> bool:
        """Whether rows that are ready to decode have waited long enough."""
        return self._prefills >= PREFILLS_PER_DECODE

    def took(self, *, prefill: bool, ready: bool) -> None:
        """A step was planned: of chunks, or of decodes or nothing. `ready`: there were rows that could decode."""
        self._prefills = self._prefills + 1 if prefill and ready else 0
