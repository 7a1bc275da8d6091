"""How fast keys go from one process to another on this machine, beside the same bytes without all that is ours.

The other process is `python -m service.bench.key_rates BYTES ENGINE [CORE]`. It gives bytes away as an engine that
prefills does, and this one takes them as one that decodes; no engine is loaded for it. Each process stays on a core of
its own, if there are two, as servers on two machines do. Left to the system, both shared a core in about half of the
runs: keys then went half as fast, and plain sockets as fast as ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from core.config import DisaggConfig
from core.disagg.interface import Offer, Taker, Wanted
from core.disagg.registry import transfer_engine
from core.memory.host_tier import BLOCK
from service.bench.plain_bytes import HOST, PLAIN
from service.process.switch_interval import shorten_switch_interval

ROOT: Final = Path(__file__).resolve().parents[2]
RUN_BLOCKS: Final = 4
"""Most blocks of host memory that follow one another in an arena that has been used for a while."""
SENT: Final = 5
"""How often the bytes are sent in a round, each way."""
ENGINE, CLAIM, TOKENS = "bench", "prompt", 1
"""Of the offers, whose bytes are of no model."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of giver and taker, and without these: medians of rounds, as is `ratio`, of theirs."""

    keys: float
    raw: float
    ratio: float


def measure_rates(nbytes: int, rounds: int, engine: str = "tcp") -> Rates:
    """Send `nbytes` bytes each way in each of `rounds` rounds, behind one that warms up. Raises TransferFailed."""
    held = _memory(nbytes)
    parts, plain = _parts(held, seed=1), PLAIN[engine].taken(held)
    keys, raw = list[float](), list[float]()
    with _cores_apart() as other, ExitStack() as stack:
        offer, giving, sending = stack.enter_context(_giving_process(nbytes, engine, other))
        # Its thread stays on the core of the one that starts it.
        config = DisaggConfig(transfer_engine=engine)
        taker = transfer_engine(config).taker(config, b"", dict)
        stack.callback(taker.close)
        for number in range(rounds + 1):
            taken, received = list[float](), list[float]()
            for each in range(SENT):
                offer(room := f"{number} {each}")
                wanted = Wanted(room, CLAIM, 0, TOKENS, ENGINE)
                taken.append(asyncio.run(_taken(taker, giving, wanted, parts)))
                received.append(plain.take(sending))
            if number:
                keys.append(nbytes / median(taken))
                raw.append(nbytes / median(received))
    return Rates(median(keys), median(raw), median(ours / most for ours, most in zip(keys, raw)))


async def _taken(taker: Taker, port: int, wanted: Wanted, parts: Sequence[memoryview]) -> float:
    """Seconds from asking until all is there, connection and proofs included."""
    began = time.perf_counter()
    await taker.take((HOST, port), wanted, parts)
    return time.perf_counter() - began


@contextmanager
def _cores_apart() -> Iterator[int | None]:
    """Keep this thread, and those that it starts, on one core. Yields another core; None where there is one only."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) == 1:
        yield None
        return
    os.sched_setaffinity(0, usable[:1])
    try:
        # Neither of the usual orders has the halves of one core first and last.
        yield usable[-1]
    finally:
        os.sched_setaffinity(0, usable)


@contextmanager
def _giving_process(
    nbytes: int, engine: str, core: int | None
) -> Iterator[tuple[Callable[[str], None], int, dict[str, Any]]]:
    """(offers the bytes in a room, port of the giver, what is told of the bytes without it)."""
    command = (
        sys.executable,
        "-P",
        "-m",
        "service.bench.key_rates",
        str(nbytes),
        engine,
        *([] if core is None else [str(core)]),
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def answer() -> str:
            if not (line := back.readline()):
                raise click.ClickException("the process that gives keys died")
            return line

        def offer(room: str) -> None:
            print(room, file=to, flush=True)
            answer()

        giving, sending = json.loads(answer())
        yield offer, giving, sending


def give(nbytes: int, engine: str, *core: int) -> None:
    """The other process: offer `nbytes` bytes in each room that standard input names, and give them without one too."""
    if core:
        os.sched_setaffinity(0, core)
    shorten_switch_interval(writes=True)
    held = _memory(nbytes)
    parts = _parts(held, seed=2)
    config = DisaggConfig(transfer_engine=engine)
    giver = transfer_engine(config).giver(config, b"", ENGINE, dict)
    print(json.dumps([giver.address[1], PLAIN[engine].given(held).told()]), flush=True)
    for line in sys.stdin:
        room = line.strip()
        giver.expect(room)
        giver.offer(Offer(room, CLAIM, TOKENS, 0, lambda _: parts), lambda _: None)
        print(flush=True)
    giver.close()


def _memory(nbytes: int) -> memoryview:
    """Memory, each page of which was written once."""
    return memoryview(bytearray(b"k") * nbytes)


def _parts(held: memoryview, seed: int) -> list[memoryview]:
    """`held` in runs of one to `RUN_BLOCKS` blocks, in the order of an arena that was used for a while."""
    pick, found, at = random.Random(seed), list[memoryview](), 0
    while at < len(held):
        end = at + BLOCK * pick.randint(1, RUN_BLOCKS)
        found.append(held[at:end])
        at = end
    pick.shuffle(found)
    return found


if __name__ == "__main__":
    give(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
