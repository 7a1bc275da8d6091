"""Engines that share experts meet by generations, and none of one outlives another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from core.engine.api import EngineState
from core.errors import StartupError
from core.types.control import Activity
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.errors import NotReady
from service.replicas.order import Order
from service.replicas.replica_set import ReplicaSet
from service.replicas.shared_fate import MOST_IN_VAIN, SharedFate
from tests.support.until import until
from tests.unit.service.replicas.rig import ask, ends, read, replicas

SETTINGS = values_of(ServerConfig.of(data_parallel=3, expert_parallel=True))


class Machine:
    """Notes what is started and ended."""

    def __init__(self) -> None:
        self.started: list[Order] = []
        self.ended: list[int] = []
        self.fails = False

    async def spawn(self, order: Order, sock: socket.socket) -> Any:
        if self.fails:
            raise OSError(11, "no process is left")
        if order.listener is not None:
            with socket.socket(fileno=socket.dup(order.listener)) as listener:
                assert listener.getsockname()[1] == order.port
        self.started.append(order)
        return SimpleNamespace(kill=lambda: None)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def fate(machine: Machine) -> Iterator[SharedFate]:
    made = SharedFate(lambda order, sock: machine.spawn(order, sock), 3, machine.ended.append)
    yield made
    made.close()


async def start(fate: SharedFate, *places: int) -> None:
    with socket.socket() as sock:
        for place in places:
            await fate.spawn(Order(SETTINGS, place, 3), sock)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_those_that_start_together_meet_at_a_port_of_their_own(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 1, 0)
    (port,) = {order.port for order in machine.started}
    assert listens(port)
    await start(fate, 2)
    assert machine.started[2].port == port and not listens(port)
    assert [order.listener is not None for order in machine.started] == [False, True, False]
    fate.ended(2)
    await start(fate, 2, 0, 1)
    (other,) = {order.port for order in machine.started[3:]}
    assert other != port and not listens(other)


async def test_one_that_ends_takes_its_generation_along_and_no_other(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 0, 1, 2)
    fate.ended(1)
    assert machine.ended == [0, 2]
    await start(fate, 1)
    fate.ended(0)
    fate.ended(2)
    assert machine.ended == [0, 2], "the first of the next generation goes on"
    await start(fate, 0)
    assert machine.started[3].port == machine.started[4].port


async def test_where_one_cannot_be_started_all_of_the_generation_start_anew(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 0, 1, 2)
    for place in (2, 0, 1):
        fate.ended(place)
    machine.ended.clear()
    machine.fails = True
    with pytest.raises(OSError):
        await start(fate, 0)
    fate.ended(0)
    machine.fails = False
    await start(fate, 1)
    with pytest.raises(OSError):
        machine.fails = True
        await start(fate, 2)
    fate.ended(2)
    assert machine.ended == [1]
    fate.ended(1)
    machine.fails = False
    await start(fate, 2, 1, 0)
    assert len({order.port for order in machine.started[-3:]}) == 1


async def test_one_that_is_being_started_as_its_generation_ends_is_ended(machine: Machine, fate: SharedFate) -> None:
    await start(fate, 0, 1)
    spawning, killed = machine.spawn, list[int]()

    async def spawn(order: Order, sock: socket.socket) -> Any:
        fate.ended(0)
        await spawning(order, sock)
        return SimpleNamespace(kill=lambda: killed.append(order.place))

    machine.spawn = spawn  # type: ignore[method-assign]
    await start(fate, 2)
    assert killed == [2] and machine.ended == [1, 2]


async def test_after_a_start_that_failed_nothing_listens() -> None:
    made: list[ReplicaSet] = []
    with pytest.MonkeyPatch.context() as patch:
        start = ReplicaSet.start
        patch.setattr(ReplicaSet, "start", lambda self: made.append(self) or start(self))
        with pytest.raises(StartupError):
            async with replicas(2, make=broken, expert_parallel=True):
                raise AssertionError("it serves")
    assert made[0]._fate._listener is None


def broken(_: Any) -> Any:
    raise StartupError("no model")


async def test_where_one_cannot_start_again_the_others_do_not_wait_for_it() -> None:
    async with replicas(2, expert_parallel=True) as rig:
        rig.refuse.add(1)
        rig.lose(0)
        await until(lambda: len(rig.processes) > 2 and rig.processes[2].returncode is not None)
        assert rig.processes[2].order.place == 0


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


async def test_all_are_tried_again_and_not_for_ever() -> None:
    async with replicas(2, expert_parallel=True) as rig:
        rig.refuse.add(1)
        rig.lose(0)
        await until(lambda: len(rig.processes) >= 4)
        assert rig.replicas.state is EngineState.READY, "one start that fails is no end"
        rig.refuse.clear()
        await until(lambda: all(each.ready for each in rig.replicas.stats.replicas))
        assert ends(await read(rig.replicas, ask((5, 6, 7))))[0].usage.completion_tokens == 4
        rig.refuse.add(1)
        before = len(rig.processes)
        rig.lose(1)
        await until(lambda: rig.replicas.state is EngineState.DEAD)
        started = {process.order.port for process in rig.processes[before:]}
        # One that cannot be started may end its generation before others were.
        assert 1 <= len(started) <= MOST_IN_VAIN


async def test_without_one_of_them_none_is_sent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(2, expert_parallel=True) as rig:
        assert all(each.ready for each in rig.replicas.stats.replicas)
        held = rig.replicas._replicas[0]
        monkeypatch.setattr(held, "look", lambda now: None)
        held.silent = True
        held._on_change()
        assert not any(each.ready for each in rig.replicas.stats.replicas)
        assert rig.replicas.stats.activity is Activity.REFUSING
        with pytest.raises(NotReady):
            await rig.replicas.generate(ask((5, 6, 7)))
        held.silent = False
        held._on_change()
        assert rig.replicas.stats.activity is Activity.SERVING
        assert ends(await read(rig.replicas, ask((5, 6, 7))))[0].usage.completion_tokens == 4


async def test_engines_that_share_nothing_do_not_end_together() -> None:
    async with replicas(2) as rig:
        rig.lose(1)
        await until(lambda: len(rig.processes) == 3 and all(each.ready for each in rig.replicas.stats.replicas))
        assert {process.order.port for process in rig.processes} == {0}
        assert [each.restarts for each in rig.replicas.stats.replicas] == [0, 1]
