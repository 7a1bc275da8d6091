"""How long a thread may keep the interpreter while another one wants it.

Every write to a client and every operation on a tensor lets go of the interpreter and wants it back; beside a thread that
is busy in Python that takes this long, each time. Shorter is not better: with 0.1 ms tokens cost less processor time at
128 streams, but every forced change waits for the other thread to run, and on busy cores the first token of a request
came 1 ms later, behind a front end 7 ms.
"""

from __future__ import annotations

import sys

SWITCH_INTERVAL_SECONDS = 0.0005
"""A tenth of Python's default."""


def shorten_switch_interval() -> None:
    """Of this process; for one that serves, before it starts its threads."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
