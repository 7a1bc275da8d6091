"""Hosts given as names: one that resolves to nothing, to another machine, or to several addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from core.errors import StartupError
from service.cli.cli import cli
from service.config.server_config import ServerConfig
from service.frontends.group import reserve
from service.server.startup_checks import check_ports

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.1"
Resolve = Callable[..., None]


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Have every name stand for these addresses; for none, as where it is not known."""

    def to(*addresses: str) -> None:
        def found(host: str, port: int, **_: Any) -> list[Any]:
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return to


@pytest.mark.parametrize("port", [0, 50999])
@pytest.mark.parametrize("setting", ["host", "metrics_host"])
def test_a_name_that_is_not_known_is_told_with_its_setting_and_advice(
    resolves: Resolve, setting: str, port: int
) -> None:
    settings: dict[str, Any] = {"port": port, "metrics_port": 0, setting: "nonesuch.invalid"}
    resolves()
    flag = "--host" if setting == "host" else "--(metrics-)?host"
    with pytest.raises(
        StartupError, match=rf"^{flag} .*cannot be resolved \(Name or service not known\); give an addr"
    ):
        check_ports(ServerConfig.of(**settings))


def test_an_address_of_another_machine_is_told_with_its_setting(resolves: Resolve) -> None:
    resolves(ELSEWHERE)
    with pytest.raises(StartupError, match=r"cannot assign requested address; --host takes an address of this machine"):
        check_ports(ServerConfig.of(host="elsewhere", port=0, metrics_port=0))


def test_one_address_of_this_machine_is_enough(resolves: Resolve) -> None:
    resolves(ELSEWHERE, HERE)
    check_ports(ServerConfig.of(host="both", port=0, metrics_port=0))
    try:
        with reserve("both", 0, "gRPC") as held:
            assert held.getsockname()[0] == HERE
    except StartupError as error:
        pytest.fail(f"nothing is reserved: {error}")


@pytest.mark.parametrize("addresses", [(HERE,), (ELSEWHERE, HERE), (HERE, "127.0.0.2")])
def test_a_port_that_is_taken_on_one_of_them_is_taken(resolves: Resolve, addresses: tuple[str, ...]) -> None:
    with socket.create_server((HERE, 0)) as taken:
        resolves(*addresses)
        with pytest.raises(StartupError, match=r"\(gRPC\): address already in use$"):
            check_ports(ServerConfig.of(host="both", port=taken.getsockname()[1], metrics_port=0))


def test_nothing_is_reserved_on_another_machine(resolves: Resolve) -> None:
    resolves(ELSEWHERE)
    with pytest.raises(StartupError, match=r"\(gRPC\): Cannot assign requested address"):
        reserve("elsewhere", 0, "gRPC")


def test_a_client_is_told_to_check_the_name_that_it_was_given() -> None:
    """`.invalid` is no name by standard; without DNS there is none either."""
    done = CliRunner().invoke(cli, ["generate", "--server", "nonesuch.invalid:50051", "hi"])
    assert done.exit_code == 1
    assert "--server: check the name, or give an address" in done.output and "nonesuch.invalid" in done.output
