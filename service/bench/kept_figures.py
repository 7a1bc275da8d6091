"""A benchmark that may be killed: figures are kept as they come, and none is begun that would not end in time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Budget:
    """Seconds for all figures. One is begun where as many are left as the longest so far took, from turn to turn."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = self._turn = time.monotonic()
        self._longest = 0.0

    def allows(self, share: float = 1.0) -> bool:
        """Begin a turn: whether one more figure has room in the first `share` of the seconds."""
        now = time.monotonic()
        self._longest, self._turn = max(self._longest, now - self._turn), now
        return now + self._longest <= self._began + share * self.seconds

    def refusal(self) -> str:
        """What is said of a figure that has no room."""
        return f"the {self.seconds:.0f} s of --budget have no room for it"


def keep(result: dict[str, Any], path: str) -> None:
    """Write `result` as JSON in one go: a reader, or a kill in the middle, finds a whole object."""
    beside = Path(f"{path}.new")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)
