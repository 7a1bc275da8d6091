"""How long a thread may keep the interpreter while another thread wants it.

Every write to a client and every operation on a tensor releases the interpreter and wants it back. Beside a thread that
is busy in Python, getting it back takes one interval, each time. Where this process writes to the clients itself, 0.1
ms instead of 0.5 ms gave 128 streams more than half as many tokens again, and kept an engine of 256 streams at its
pace. A short interval is not free: each forced change waits until the other thread runs. Where front ends write, the
first token came 7 ms later with 0.1 ms.

The interval must be shorter than a turn of a busy event loop. In each turn `select` releases the interpreter for a
microsecond, and a thread that waits for it begins its interval anew. Beside a loop with turns of 0.2 ms that never
rested, 150 steps took 2 s at 0.1 ms and 15 s at 0.5 ms; at 5 ms the device stood still. Engines behind front ends were
not tested for this; none was seen to come near it.
"""

from __future__ import annotations

import sys

WRITING_SECONDS = 0.0001
ENGINE_ONLY_SECONDS = 0.0005
"""Python's default is 5 ms."""


def shorten_switch_interval(*, writes: bool) -> None:
    """Set the interval of this process, before it starts its threads; `writes`: it writes to the clients itself."""
    sys.setswitchinterval(WRITING_SECONDS if writes else ENGINE_ONLY_SECONDS)
