"""How long steps take, and so how late the next one is planned.

Two steps are in flight (law 10), so a plan is made while another step computes, and is out of date by all that arrives
meanwhile: a newcomer waits for the rest of one step and for the whole of the next. Where steps are long and tenants
share them, that is what one tenant's flood costs another's first token. So there the next plan is made late: when three
quarters of the running step should be over. The quarter that is left is many times what the host needs, so the device
still finds its next step submitted.
"""

from __future__ import annotations

from collections import deque

LONG_SECONDS = 0.05
"""A step that takes less is not worth waiting for: decoding on a GPU, a few rows on a CPU."""
LATEST = 0.75
"""Of a step: how much of it has passed when the next is planned."""
SHARED_SECONDS = 10.0
"""Steps count as shared for so long after two tenants had work: one that sends its requests one by one is away in
between."""
RECENT = 8
"""Steps by which the next ones are judged: more than one, since a short one between them says nothing of the others."""


class Pace:
    """Measures steps as the loop sees them. Seconds are those of its clock."""

    def __init__(self, long_seconds: float = LONG_SECONDS) -> None:
        self._long_seconds = long_seconds
        self._flying: deque[tuple[float, int]] = deque()
        """Of the steps in flight: when each was submitted, and its tokens."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """Of the last ones: seconds and tokens."""
        self._ended = self._shared_until = float("-inf")

    def shared(self, now: float) -> None:
        """Several tenants have work."""
        self._shared_until = now + SHARED_SECONDS

    def submitted(self, now: float, tokens: int) -> None:
        """A step went to the device."""
        self._flying.append((now, tokens))

    def finished(self, now: float) -> None:
        """The result of the oldest step in flight is here."""
        at, tokens = self._flying.popleft()
        self._recent.append((now - max(at, self._ended), tokens))
        self._ended = now

    @property
    def is_slow(self) -> bool:
        """Whether any of the last steps was long."""
        return any(seconds >= self._long_seconds for seconds, _ in self._recent)

    def due(self) -> float:
        """When the step behind the one that runs should be planned; the past, where it should be at once."""
        if not self._flying:
            return float("-inf")
        at, tokens = self._flying[0]
        if self._shared_until < at:
            return float("-inf")
        expected = self._expected(tokens)
        return max(at, self._ended) + LATEST * expected if expected >= self._long_seconds else float("-inf")

    def _expected(self, tokens: int) -> float:
        """At least so long a step of so many tokens takes, by the quickest of the last ones of half to twice as many.

        Of a larger one it is as much less as the tokens are fewer. One that is over sooner than this costs the device
        what the host needs for a plan.
        """
        alike = [(seconds, most) for seconds, most in self._recent if most <= 2 * tokens <= 4 * most]
        return min((seconds * min(1.0, tokens / most) for seconds, most in alike), default=0.0)
