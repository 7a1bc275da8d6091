"""What kind of work one step holds."""

from __future__ import annotations

from enum import Enum


class ForwardMode(Enum):
    """EXTEND: prompt chunks. DECODE: one token per request. MIXED: chunks, then decode tails. IDLE: no rows."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"

    @classmethod
    def of(cls, num_extend: int, num_decode: int) -> ForwardMode:
        """The mode of a step with so many prefill segments and so many decode rows."""
        if num_extend and num_decode:
            return cls.MIXED
        if num_extend:
            return cls.EXTEND
        return cls.DECODE if num_decode else cls.IDLE
