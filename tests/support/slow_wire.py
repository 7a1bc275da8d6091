"""The wire of a slow cable: what goes in at one end comes out at the other late, out of order, or never.

Kernels for tests often have no netem. So each end is a TUN device whose packets this process carries over.

    python -m tests.support.slow_wire HERE THERE LEAST MOST LOST SEED

HERE and THERE: descriptors of the ends. LEAST and MOST: milliseconds that a packet takes, each its own. LOST: of how
many packets one does not arrive, 0 for none.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import sys
import time

LARGEST = 65_535
"""Bytes of a packet."""


def carry(ends: tuple[int, int], least: float, most: float, lost: int, seed: int) -> None:
    """Carry packets both ways until the ends are gone. `least`, `most`: seconds."""
    rng, under_way = random.Random(seed), list[tuple[float, int, int, bytes]]()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select(ends, (), (), wait)
        now = time.monotonic()
        for end in readable:
            packet = os.read(end, LARGEST)
            if not lost or rng.randrange(lost):
                to = ends[1 - ends.index(end)]
                # The seed decides between packets of one moment too.
                heapq.heappush(under_way, (now + rng.uniform(least, most), rng.getrandbits(60), to, packet))
        while under_way and under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(under_way)
            try:
                os.write(to, packet)
            except OSError:
                # An end that is down takes nothing.
                continue


if __name__ == "__main__":
    here, there, *times = sys.argv[1:]
    carry((int(here), int(there)), float(times[0]) / 1000, float(times[1]) / 1000, int(times[2]), int(times[3]))
