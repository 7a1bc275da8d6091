"""Turns of prompt chunks and decodes, where one step holds only one of the two (`--no-mixed-chunk`)."""

from __future__ import annotations

from core.config import PREFILLS_PER_DECODE


class Turns:
    """Chunks go first, as in SGLang, because they bring rows that decode together. Then decodes are owed one step.

    While prompts keep arriving, one step in `PREFILLS_PER_DECODE + 1` decodes and the others prefill. With nothing to
    decode every step prefills; with nothing to prefill every step decodes.
    """

    def __init__(self) -> None:
        self._prefills = 0

    @property
    def decode_owed(self) -> bool:
        """Whether rows that are ready to decode have waited long enough."""
        return self._prefills >= PREFILLS_PER_DECODE

    def took(self, *, prefill: bool, ready: bool) -> None:
        """A step was planned. `prefill`: it holds chunks, else decodes or nothing. `ready`: some row could decode."""
        self._prefills = self._prefills + 1 if prefill and ready else 0
