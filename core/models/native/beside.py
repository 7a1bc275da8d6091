"""A thread for work that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable


def beside(work: Callable[[], None]) -> None:
    """Run `work` on a daemon thread of its own. No thread waits for it, so it does not delay the end of the process."""
    threading.Thread(target=work, name="slipstream-native", daemon=True).start()
