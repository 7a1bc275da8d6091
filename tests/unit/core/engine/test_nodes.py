"""Which ranks a machine has, on which devices, and where it meets the others."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig, NodesConfig
from core.engine import nodes
from core.engine.nodes import meeting_of
from core.errors import ConfigError, StartupError
from tests.support.ports import free_port

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def made(size: int = 4, **settings: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig("x", tensor_parallel=size), nodes=NodesConfig(**settings))


def test_each_machine_has_its_part_of_the_ranks_from_its_first_device_on() -> None:
    here = [NodesConfig(2, node).ranks_here(8) for node in range(2)]
    assert [*here[0], *here[1]] == [*range(8)] and len(here[0]) == 4
    assert [NodesConfig(2, 1).device_of(rank, 8) for rank in here[1]] == [0, 1, 2, 3]
    started_by_torchrun = NodesConfig(8, 5, first_device=1)
    assert [*started_by_torchrun.ranks_here(8)] == [5] and started_by_torchrun.device_of(5, 8) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nnodes": 3}, "nnodes 3 needs a multiple of as many ranks: there are 4"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank must be less than nnodes, which is 2; got 2"),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, "master_addr is not loopback: rank_secret_file is needed"),
        ({"nnodes": 2, "master_addr": "leader.svc"}, "master_addr is not loopback: rank_secret_file is needed"),
        ({"master_port": 65536}, "master_port must be at most 65535"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(**settings)


def test_one_machine_meets_on_a_port_of_its_own() -> None:
    meeting = meeting_of(made(), CPU, leads=True)
    assert meeting.listener is not None
    with meeting.listener as listener:
        assert listener.getsockname() == ("127.0.0.1", meeting.port) and not meeting.secret


def test_several_meet_at_the_first_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of ours\n")
    config = made(nnodes=2, master_port=free_port(), rank_secret_file=str(secret), join_timeout=7.0)
    leading, following = meeting_of(config, CPU, leads=True), meeting_of(config, CPU, leads=False)
    assert leading.listener is not None and following == dataclasses.replace(leading, listener=None)
    assert following.secret == b"a secret of ours" and following.seconds == 7.0
    with leading.listener as listener, pytest.raises(StartupError) as refused:
        assert listener.getsockname() == ("127.0.0.1", config.nodes.master_port)
        meeting_of(config, CPU, leads=True)
    taken = f"master_addr 127.0.0.1, master_port {config.nodes.master_port}: address already in use"
    assert refused.value.message == taken
    hosted = dataclasses.replace(config, nodes=dataclasses.replace(config.nodes, hosted=True))
    assert meeting_of(hosted, CPU, leads=True).listener is None


def test_an_address_of_another_machine_is_none_to_listen_at(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of ours")
    config = made(nnodes=2, master_addr="198.18.99.1", rank_secret_file=str(secret), join_timeout=1.0)
    with pytest.raises(StartupError, match="cannot assign requested address: it takes an address of machine 0"):
        meeting_of(config, CPU, leads=True)


def test_a_name_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pods come a little after the pods."""
    answers: list[Any] = [OSError(), OSError(), [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]]

    def resolve(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "PAUSE", 0.001)
    monkeypatch.setattr(nodes.socket, "getaddrinfo", resolve)
    assert meeting_of(made(nnodes=2, master_addr="localhost"), CPU, leads=False).host == "127.0.0.1"
    answers[:] = [socket.gaierror(-2, "Name or service not known")] * 10000
    said = r"master_addr localhost: the name cannot be resolved within 1 s \(Name or service not known\)"
    with pytest.raises(StartupError, match=said):
        meeting_of(made(nnodes=2, master_addr="localhost", join_timeout=1.0), CPU, leads=False)


@pytest.mark.parametrize(("settings", "wanted"), [({}, 4), ({"nnodes": 2}, 2), ({"nnodes": 4, "first_device": 2}, 3)])
def test_a_machine_needs_devices_for_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], wanted: int
) -> None:
    config = made(**settings, master_port=free_port())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: wanted)
    meeting_of(config, CUDA, leads=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: wanted - 1)
    with pytest.raises(ConfigError, match=f"tensor_parallel 4 needs {wanted} devices here: there are {wanted - 1}"):
        meeting_of(config, CUDA, leads=False)
