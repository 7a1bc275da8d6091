"""What part of the machine each engine gets: cores, devices, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.memory import sizing
from core.model_config import Peers
from service.config.server_config import ServerConfig
from service.config.sources import values_of
from service.replicas import builder, cores, devices
from service.replicas.cores import cores_of, own_cores, shared_out, threads_of_each
from service.replicas.devices import own_devices, take_devices
from service.replicas.order import Order

# Two sockets of four cores with two threads each, numbered as Linux does: first one thread of every core.
TWO_SOCKETS = {cpu: (cpu % 8 // 4, cpu % 4) for cpu in range(16)}


def test_threads_of_a_core_and_cores_of_a_socket_stay_together() -> None:
    assert shared_out(TWO_SOCKETS, 2) == [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]
    assert shared_out(TWO_SOCKETS, 4)[1] == (2, 10, 3, 11)
    assert shared_out(TWO_SOCKETS, 8) == [(cpu, cpu + 8) for cpu in range(8)]


def test_all_have_as_many_and_none_has_a_part_of_a_core() -> None:
    for count in (3, 5, 6, 7):
        parts = shared_out(TWO_SOCKETS, count)
        assert len(parts) == count and len({len(part) for part in parts}) == 1
        assert len({cpu for part in parts for cpu in part}) == sum(map(len, parts))
        assert all(
            {TWO_SOCKETS[cpu] for cpu in part}.isdisjoint(
                TWO_SOCKETS[cpu] for other in parts if other is not part for cpu in other
            )
            for part in parts
        )
    assert shared_out(TWO_SOCKETS, 9) == [], "fewer cores than engines"


def test_cores_are_read_of_the_system(tmp_path: Path) -> None:
    folder = tmp_path / "cpu3" / "topology"
    folder.mkdir(parents=True)
    (folder / "physical_package_id").write_text("1\n")
    (folder / "core_id").write_text("5\n")
    assert cores_of([3, 4], tmp_path) == {3: (1, 5), 4: (-1, 4)}


def test_with_a_quota_no_cores_are_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "usable_cpus", lambda: 8)
    assert len(own_cores(2)) == 2 and {len(part) for part in own_cores(2)} <= {2, 4, 8}
    monkeypatch.setattr(cores, "usable_cpus", lambda: 6)
    assert own_cores(2) == []
    assert [threads_of_each(count) for count in (1, 2, 3, 6, 12)] == [5, 2, 1, 1, 1]


def test_devices_are_neighbours_and_there_are_enough() -> None:
    assert [own_devices(list("abcd"), place, 2, 2) for place in range(2)] == [["a", "b"], ["c", "d"]]
    with pytest.raises(ConfigError, match="data_parallel 3 with 2 ranks each needs 6 devices: there are 4"):
        own_devices(list("abcd"), 0, 3, 2)


@pytest.mark.parametrize(
    ("found", "named", "wanted"),
    [
        (4, None, "2,3"),
        (4, "a,b,c,d,e", "c,d"),
        (4, "7,6,5,4", "5,4"),
        (4, " GPU-a , GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d"),
        (0, "", ""),
    ],
)
def test_a_process_sees_its_own_devices_alone(
    found: int, named: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setenv(devices.VISIBLE, named or "")
    take_devices("auto", 1, 2, 2)
    assert os.environ[devices.VISIBLE] == wanted


def test_a_cpu_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv(devices.VISIBLE, "0")
    take_devices("cpu", 1, 2, 1)
    assert os.environ[devices.VISIBLE] == "0"
    with pytest.raises(ConfigError, match="needs 2 devices"):
        take_devices("auto", 1, 2, 1)
    monkeypatch.setenv(devices.VISIBLE, "0,1")
    with pytest.raises(ConfigError, match="needs 2 devices: there are 1"):
        take_devices("auto", 1, 2, 1)


def test_an_order_is_read_as_it_was_written() -> None:
    config = ServerConfig.of(
        data_parallel=4, adapter=(("a", "dir"),), host_cache_bytes=400, cpu_threads=None, model="/m", seed=3
    )
    order = Order(values_of(config), 2, 4, (1, 2), 5, True)
    again = Order.read(order.write().decode())
    assert again.write() == order.write() and again.server_config() == config
    engine = again.engine_config()
    assert engine.lora.adapters == (("a", "dir"),) and engine.model.path == "/m" and engine.seed == 3
    assert (engine.memory.machine_share, engine.memory.host_cache_bytes) == (0.25, 100)
    assert engine.executor.cpu_threads == 5
    asked = Order(values_of(ServerConfig.of(cpu_threads=2)), 0, 1, (), 5).engine_config()
    assert asked.executor.cpu_threads == 2


def test_an_order_says_where_engines_that_share_experts_meet() -> None:
    shared = Order(values_of(ServerConfig.of(data_parallel=3, expert_parallel=True)), 1, 3, port=4000, listener=7)
    assert Order.read(shared.write().decode()).engine_config().model.peers == Peers(1, 3, 4000, 7)
    assert Order(values_of(ServerConfig.of(data_parallel=3)), 1, 3).engine_config().model.peers is None
    with pytest.raises(ConfigError, match="expert_parallel needs data_parallel"):
        ServerConfig.of(expert_parallel=True)


def test_engines_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(sizing, "free_memory", lambda: 4 * 2**30)
    cpu = torch.device("cpu")
    whole, half = (sizing.free_bytes(cpu, share) for share in (1.0, 0.5))
    assert whole == 2 * half == 2**30
    assert sizing.free_bytes(cpu) == whole


@pytest.mark.parametrize("own", [[(0,), (1,)], []], ids=["cores", "quota"])
def test_each_is_told_its_part(own: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "own_cores", lambda count: own)
    monkeypatch.setattr(builder, "threads_of_each", lambda count: 7)
    config = ServerConfig.of(data_parallel=2, model="org/name")
    orders = builder.BuiltReplicas(config, True, None, None).orders()  # type: ignore[arg-type]
    assert [(order.place, order.count, order.from_hub) for order in orders] == [(0, 2, True), (1, 2, True)]
    assert [order.cpus for order in orders] == (own or [(), ()])
    assert {order.threads for order in orders} == ({None} if own else {7})


def test_models_of_the_hub_are_known() -> None:
    assert builder.from_hub(ServerConfig.of(model="org/name"))
    assert not builder.from_hub(ServerConfig.of())


def test_a_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel is not possible with role"):
        ServerConfig.of(data_parallel=2, role="prefill")


def test_there_are_not_more_than_a_machine_could_have() -> None:
    assert ServerConfig.of(data_parallel=64).data_parallel == 64
    for count in (0, 65):
        with pytest.raises(ConfigError, match="data_parallel must be at"):
            ServerConfig.of(data_parallel=count)


def test_limits_of_the_server_are_those_of_all_engines() -> None:
    config = ServerConfig.of(data_parallel=3, max_running_requests=10, max_queued_requests=5)
    assert (config.max_running, config.max_queued) == (30, 15)
    assert (
        config.concurrency_limit == ServerConfig.of(max_running_requests=30, max_queued_requests=15).concurrency_limit
    )
