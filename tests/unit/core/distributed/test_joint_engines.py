"""What engines that share experts tell each other, over torch.distributed: bells, and rows of uneven numbers."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
from typing import Any

import torch

from core.distributed.bells import LEFT, MOST_SENT, Bells
from core.distributed.exchange import DistributedExchange
from core.distributed.meeting import HOST, Meeting
from core.distributed.world import World

CPU = torch.device("cpu")
SIZES = [3, 0, 2]
MANY = 4 * MOST_SENT


def _rows(rank: int) -> torch.Tensor:
    return torch.full((SIZES[rank], 4), rank, dtype=torch.uint8)


def _exchanged(world: World) -> None:
    """What each of three engines has to find."""
    exchange, rank = DistributedExchange(world), world.rank
    assert exchange.sizes(SIZES[rank]) == SIZES
    everything = torch.cat([_rows(each) for each in range(3)])
    assert torch.equal(exchange.gather(_rows(rank), SIZES), everything)
    assert torch.equal(exchange.gather(_rows(0), [3, 3, 3]), _rows(0).repeat(3, 1))
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.arange(5, dtype=dtype)[:, None].expand(5, 2) * (rank + 1)
        assert torch.equal(exchange.reduce(parts, SIZES), (6 * parts / (rank + 1)).split(SIZES)[rank])
        even = torch.arange(6, dtype=dtype)[:, None].expand(6, 2)
        assert torch.equal(exchange.reduce(even, [2, 2, 2]), 3 * even[2 * rank : 2 * rank + 2])
    assert exchange.most([rank, -rank, 0.5]) == [2.0, 0.0, 0.5]


def _other(rank: int, port: int) -> None:
    """An engine that answers each bell of the first by one for the next step, and leaves with it."""
    world = World.join(rank, 3, Meeting(port), CPU)
    _exchanged(world)
    bells, heard = Bells(world), queue.SimpleQueue[tuple[int, int]]()
    bells.listen(lambda sender, step: heard.put((sender, step)), lambda error: None)
    left = set[int]()
    while len(left) < 2:
        sender, step = heard.get(timeout=60)
        if step == LEFT:
            left.add(sender)
        elif sender == 0:
            bells.ring(step + 1)
        if (sender, step) == (0, LEFT):
            bells.leave()
    # A group that is let go of before its listeners have ended ends the process.
    world.leave()


def test_engines_hear_of_steps_and_of_each_others_end() -> None:
    listener = socket.create_server((HOST, 0))
    spawning, port = multiprocessing.get_context("spawn"), listener.getsockname()[1]
    processes: list[Any] = [spawning.Process(target=_other, args=(rank, port), daemon=True) for rank in (1, 2)]
    for each in processes:
        each.start()
    world = World.join(0, 3, Meeting(port, listener), CPU)
    try:
        _exchanged(world)
        bells, heard, lost = Bells(world), queue.SimpleQueue[tuple[int, int]](), queue.SimpleQueue[BaseException]()
        bells.listen(lambda rank, step: heard.put((rank, step)), lost.put)
        for step in range(0, MANY, 2):
            bells.ring(step)
            assert {heard.get(timeout=60) for _ in range(2)} == {(1, step + 1), (2, step + 1)}
            # Both have begun this step already, and wait for no bell: it would be answered.
            bells.ring(step + 1)
        assert len(bells._sent) <= 2 * MOST_SENT
        bells.leave()
        assert not bells._sent, "all have heard it"
        assert {heard.get(timeout=60) for _ in range(2)} == {(1, LEFT), (2, LEFT)}
        for each in processes:
            each.join(60)
            assert each.exitcode == 0
        until_ended(bells)
        assert lost.empty(), "none that has left is missed"
    finally:
        for each in processes:
            each.kill()
            each.join()
        world.leave()


def until_ended(bells: Bells) -> None:
    for each in [each for each in threading.enumerate() if each.name.startswith("slipstream-bell-")]:
        each.join(20)
        assert not each.is_alive() and each.daemon


def _gone(port: int) -> None:
    Bells(World.join(1, 2, Meeting(port), CPU))


def test_an_engine_that_ends_without_leaving_is_lost() -> None:
    listener = socket.create_server((HOST, 0))
    process = multiprocessing.get_context("spawn").Process(target=_gone, args=(listener.getsockname()[1],), daemon=True)
    process.start()
    world = World.join(0, 2, Meeting(listener.getsockname()[1], listener), CPU)
    try:
        lost = queue.SimpleQueue[BaseException]()
        Bells(world).listen(lambda rank, step: None, lost.put)
        assert isinstance(lost.get(timeout=60), RuntimeError)
    finally:
        process.kill()
        process.join()
        world.leave()
