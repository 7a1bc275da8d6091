"""How fast keys go from one process to another over loopback, beside plain sockets that send the same bytes.

The other process is `python -m service.bench.key_rates BYTES [CORE]`. It gives bytes away as an engine that prefills
does, and this one takes them as one that decodes; no engine is loaded for it. Each process stays on a core of its own,
if there are two, as servers on two machines do. Left to the system, both shared a core in about half of the runs: keys
then went half as fast, and plain sockets as fast as ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import click

from core.config import DisaggConfig
from core.disagg.interface import Offer, Wanted
from core.disagg.tcp_giver import TcpGiver
from core.disagg.tcp_taker import TcpTaker
from core.memory.host_tier import BLOCK
from service.process.switch_interval import shorten_switch_interval

ROOT: Final = Path(__file__).resolve().parents[2]
RUN_BLOCKS: Final = 4
"""Most blocks of host memory that follow one another in an arena that has been used for a while."""
PIECE: Final = 1 << 20
"""Bytes of one call that sends, of plain sockets: of sizes from 64 KiB to 256 MiB, 1 and 4 MiB were the fastest."""
SENT: Final = 5
"""How often the bytes are sent in a round, each way."""
HOST: Final = "127.0.0.1"
ENGINE, CLAIM, TOKENS = "bench", "prompt", 1
"""Of the offers, whose bytes are of no model."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of giver and taker, and of plain sockets: medians of rounds, as is `ratio`, of theirs."""

    keys: float
    raw: float
    ratio: float


def measure_rates(nbytes: int, rounds: int) -> Rates:
    """Send `nbytes` bytes each way in each of `rounds` rounds, behind one that warms up. Raises TransferFailed."""
    held, limits = _memory(nbytes), DisaggConfig()
    parts = _parts(held, seed=1)
    keys, raw = list[float](), list[float]()
    with _cores_apart() as other, ExitStack() as stack:
        offer, giving, sending = stack.enter_context(_giving_process(nbytes, other))
        # Its thread stays on the core of the one that starts it.
        taker = TcpTaker(limits.networks, b"", dict, limits.transfer_timeout)
        stack.callback(taker.close)
        for number in range(rounds + 1):
            taken, received = list[float](), list[float]()
            for each in range(SENT):
                offer(room := f"{number} {each}")
                wanted = Wanted(room, CLAIM, 0, TOKENS, ENGINE)
                taken.append(asyncio.run(_taken(taker, giving, wanted, parts)))
                received.append(_received(sending, held))
            if number:
                keys.append(nbytes / median(taken))
                raw.append(nbytes / median(received))
    return Rates(median(keys), median(raw), median(ours / most for ours, most in zip(keys, raw)))


async def _taken(taker: TcpTaker, port: int, wanted: Wanted, parts: Sequence[memoryview]) -> float:
    """Seconds from asking until all is there, connection and proofs included."""
    began = time.perf_counter()
    await taker.take((HOST, port), wanted, parts)
    return time.perf_counter() - began


def _received(port: int, held: memoryview) -> float:
    """Seconds from connecting until all is there."""
    began = time.perf_counter()
    with socket.create_connection((HOST, port)) as sock:
        left = held
        while len(left):
            count = sock.recv_into(left)
            if not count:
                raise click.ClickException("the plain connection ended")
            left = left[count:]
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
def _giving_process(nbytes: int, core: int | None) -> Iterator[tuple[Callable[[str], None], int, int]]:
    """(offers the bytes in a room, port of the giver, port where plain sockets are connected)."""
    command = (
        sys.executable,
        "-P",
        "-m",
        "service.bench.key_rates",
        str(nbytes),
        *([] if core is None else [str(core)]),
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
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


def give(nbytes: int, *core: int) -> None:
    """The other process: offer `nbytes` bytes in each room that standard input names, and send them to who connects."""
    if core:
        os.sched_setaffinity(0, core)
    shorten_switch_interval(writes=True)
    held = _memory(nbytes)
    parts = _parts(held, seed=2)
    giver = TcpGiver((HOST, 0), None, b"", ENGINE, dict, DisaggConfig().transfer_timeout)
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_send_all, args=(listener, held), daemon=True).start()
    print(json.dumps([giver.address[1], listener.getsockname()[1]]), flush=True)
    for line in sys.stdin:
        room = line.strip()
        giver.expect(room)
        giver.offer(Offer(room, CLAIM, TOKENS, 0, lambda _: parts), lambda _: None)
        print(flush=True)
    giver.close()


def _send_all(listener: socket.socket, held: memoryview) -> None:
    while True:
        peer, _ = listener.accept()
        with peer:
            for begin in range(0, len(held), PIECE):
                peer.sendall(held[begin : begin + PIECE])


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
    give(*map(int, sys.argv[1:]))
