"""Hidden states go from each rank to the next and from the last to the first, over torch.distributed."""

from __future__ import annotations

import multiprocessing
import socket
from typing import Any

import torch

from core.distributed.meeting import HOST, Meeting
from core.distributed.ring import MOST_SENT, DistributedRing
from core.distributed.world import World

CPU = torch.device("cpu")
MANY = MOST_SENT + 3


def _later(rank: int, port: int) -> None:
    """A rank that adds its number to what comes, and agrees with the first on nothing but what that one says."""
    ring = DistributedRing(World.join(rank, 3, Meeting(port), CPU))
    for number in range(1, MANY + 1):
        ring.send(ring.expect(torch.empty(1, number, 4)).wait() + rank)
    assert ring.agree([float(rank)]) == [0.5] and ring.all_equal(7)
    assert not ring.all_equal(rank)
    ring.send(ring.expect(torch.empty(1)).wait())
    # What is on its way when a process ends is lost.
    for work, _ in ring._sent:
        work.wait()


def test_states_go_round() -> None:
    """Several are on their way at a time: what comes home does not wait for what goes onward."""
    listener = socket.create_server((HOST, 0))
    spawning, port = multiprocessing.get_context("spawn"), listener.getsockname()[1]
    processes: list[Any] = [spawning.Process(target=_later, args=(rank, port), daemon=True) for rank in (1, 2)]
    for each in processes:
        each.start()
    world = World.join(0, 3, Meeting(port, listener), CPU)
    try:
        ring = DistributedRing(world)
        assert ring._onward is not ring._home, "NCCL does the transfers of one group in order"
        coming = []
        for number in range(1, MANY + 1):
            # As some layers give them: not contiguous.
            ring.send(torch.full((1, 4, number), float(number)).transpose(1, 2))
            coming.append(ring.expect(torch.empty(1, number, 4)))
        assert len(ring._sent) <= MOST_SENT
        for number, each in enumerate(coming, 1):
            assert torch.equal(each.wait(), torch.full((1, number, 4), number + 3.0))
        assert ring.agree([0.5]) == [0.5] and ring.all_equal(7)
        assert not ring.all_equal(0)
        ring.send(torch.ones(1))
        assert ring.expect(torch.empty(1)).wait().tolist() == [1.0], "no rank has failed"
    finally:
        for each in processes:
            each.kill()
            each.join()
        world.leave()
