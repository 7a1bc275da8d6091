"""How long steps take, and from that how late the next one is planned.

Two steps are in flight (law 10), so a plan is made while another step computes, and does not hold requests that arrive
meanwhile: a newcomer waits for the rest of one step and for the whole of the next. Where steps are long and tenants
share them, that wait is what one tenant's flood costs another's first token. There the next plan is made late: when
three quarters of the running step should be over. The quarter that is left is many times what the host needs for a
plan, so the device still finds its next step submitted.
"""

from __future__ import annotations

from collections import deque

LONG_SECONDS = 0.05
"""For a shorter step a late plan is not worth while: decoding on a GPU, a few rows on a CPU."""
LATEST = 0.75
"""Fraction of the running step that should have passed when the next step is planned."""
SHARED_SECONDS = 10.0
"""Steps count as shared for this long after two tenants had work: a tenant that sends its requests one by one has no
work in between."""
RECENT = 8
"""Finished steps from which the next are estimated. More than one, since one short step says nothing of the others."""


class Pace:
    """Measures steps from their submission to the moment at which the loop sees their results.

    All times are seconds of the loop's clock.
    """

    def __init__(self, long_seconds: float = LONG_SECONDS) -> None:
        self._long_seconds = long_seconds
        self._flying: deque[tuple[float, int]] = deque()
        """Steps in flight, oldest first: (when submitted, tokens)."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """The last finished steps: (seconds, tokens)."""
        self._ended = self._shared_until = float("-inf")

    def shared(self, now: float) -> None:
        """Several tenants have work at `now`."""
        self._shared_until = now + SHARED_SECONDS

    def submitted(self, now: float, tokens: int) -> None:
        """A step of `tokens` tokens was submitted at `now`."""
        self._flying.append((now, tokens))

    def finished(self, now: float) -> None:
        """The result of the oldest step in flight was seen at `now`."""
        at, tokens = self._flying.popleft()
        # The step began to run when the one before it ended, if that was after its submission.
        self._recent.append((now - max(at, self._ended), tokens))
        self._ended = now

    @property
    def is_slow(self) -> bool:
        """Whether any of the last `RECENT` steps took `long_seconds` or more."""
        return any(seconds >= self._long_seconds for seconds, _ in self._recent)

    def due(self) -> float:
        """When the step behind the running one should be planned; -inf for at once."""
        if not self._flying:
            return float("-inf")
        at, tokens = self._flying[0]
        if self._shared_until < at:
            return float("-inf")
        expected = self._expected(tokens)
        return max(at, self._ended) + LATEST * expected if expected >= self._long_seconds else float("-inf")

    def _expected(self, tokens: int) -> float:
        """A low estimate of the seconds of a step of `tokens` tokens; 0.0 where no recent step is like it.

        It is the time of the quickest recent step of half to twice as many tokens. The time of a larger step is scaled
        down by tokens. Too low an estimate makes the plan early. Too high an estimate leaves the device idle for the
        time that the host needs for a plan.
        """
        alike = [(seconds, most) for seconds, most in self._recent if most <= 2 * tokens <= 4 * most]
        return min((seconds * min(1.0, tokens / most) for seconds, most in alike), default=0.0)
