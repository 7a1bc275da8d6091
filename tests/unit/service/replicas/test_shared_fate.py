"""Engines that share experts meet by generations, and none of one outlives another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.replicas.order import Order
from service.replicas.shared_fate import SharedFate
from tests.support.until import until
from tests.unit.service.replicas.rig import ask, ends, read, replicas

SETTINGS = values_of(ServerConfig.of(data_parallel=3, expert_parallel=True))


class Machine:
    """Notes what is started and ended; each start connects to where it is told to meet."""

    def __init__(self) -> None:
        self.started: list[Order] = []
        self.ended: list[int] = []
        self.fails = False

    async def spawn(self, order: Order, sock: socket.socket) -> Any:
        if self.fails:
            raise OSError(11, "no process is left")
        socket.create_connection(("127.0.0.1", order.port)).close()
        if order.listener is not None:
            with socket.socket(fileno=socket.dup(order.listener)) as listener:
                assert listener.getsockname()[1] == order.port
        self.started.append(order)
        return order


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def fate(machine: Machine) -> Iterator[SharedFate]:
    made = SharedFate(machine.spawn, 3, machine.ended.append)
    yield made
    made.close()


async def start(fate: SharedFate, *places: int) -> None:
    with socket.socket() as sock:
        for place in places:
            await fate.spawn(Order(SETTINGS, place, 3), sock)


async def test_those_that_start_together_meet_at_a_port_of_their_own(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 1, 0, 1, 2)
    first = {order.port for order in (machine.started[0], machine.started[1], machine.started[3])}
    assert len(first) == 1 and machine.started[2].port not in first
    assert [order.listener is not None for order in machine.started] == [False, True, False, False]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", *first))
    await start(fate, 2, 0)
    assert len({order.port for order in machine.started}) == 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", machine.started[2].port))


async def test_one_that_ends_takes_along_its_generation_alone(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 0, 1, 2)
    fate.ended(1)
    assert machine.ended == [0, 2]
    await start(fate, 1)
    fate.ended(0)
    assert machine.ended == [0, 2, 2], "the first of the next generation goes on"
    await start(fate, 0)
    fate.ended(2)
    assert machine.ended == [0, 2, 2]


async def test_one_that_cannot_be_started_counts_as_started(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 0)
    machine.fails = True
    with pytest.raises(OSError):
        await start(fate, 1)
    fate.ended(1)
    assert machine.ended == [0]
    machine.fails = False
    await start(fate, 1, 0)
    assert machine.started[1].port == machine.started[2].port != machine.started[0].port


async def test_all_engines_of_a_server_start_again() -> None:
    async with replicas(3, expert_parallel=True) as rig:
        processes = list(rig.processes)
        rig.lose(1)
        await until(lambda: len(rig.processes) == 6 and all(each.ready for each in rig.replicas.stats.replicas))
        assert all(process.returncode is not None for process in processes)
        ports = [process.order.port for process in rig.processes]
        assert len(set(ports[:3])) == len(set(ports[3:])) == 1 and ports[0] != ports[3]
        assert [each.restarts for each in rig.replicas.stats.replicas] == [1, 1, 1]
        assert ends(await read(rig.replicas, ask((5, 6, 7))))[0].usage.completion_tokens == 4


async def test_engines_that_share_nothing_do_not_end_together() -> None:
    async with replicas(2) as rig:
        rig.lose(1)
        await until(lambda: len(rig.processes) == 3 and all(each.ready for each in rig.replicas.stats.replicas))
        assert {process.order.port for process in rig.processes} == {0}
        assert [each.restarts for each in rig.replicas.stats.replicas] == [0, 1]
