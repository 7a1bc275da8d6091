"""Secrets and settings of transfers: what is wrong with one is said in a line that names it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from core.config import DisaggConfig
from core.disagg import registry
from core.disagg.registry import SECRET, check_transfers, transfer_engine
from core.errors import ConfigError, StartupError
from core.secret_file import read_secret


def test_a_way_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="transfer_engine must be one of tcp, nixl; got 'pigeon'"):
        transfer_engine(DisaggConfig(transfer_engine="pigeon"))


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: pip install 'slipstream\[nixl\]'"):
        transfer_engine(DisaggConfig(transfer_engine="nixl"))
    assert transfer_engine(DisaggConfig())


def test_an_address_in_use_is_known_before_weights_are_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError) as refused:
            check_transfers(DisaggConfig(role="prefill", transfer_port=port))
        assert refused.value.message == f"transfer_host 127.0.0.1, transfer_port {port}: Address already in use"
        check_transfers(DisaggConfig(role="decode", transfer_port=port))
    check_transfers(DisaggConfig(role="prefill", transfer_port=port))


def test_a_secret_is_read_without_its_last_line_break(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    assert read_secret(SECRET, str(file)) == b"0123456789abcdef"
    assert read_secret(SECRET, None) == b""
    file.write_bytes(b"0123456789abcde\n")
    with pytest.raises(ConfigError, match="at least 16 bytes; this one 15"):
        read_secret(SECRET, str(file))
    with pytest.raises(ConfigError, match="transfer_secret_file: No such file"):
        read_secret(SECRET, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"role": "both sides"}, "role must be one of both, prefill, decode"),
        ({"transfer_port": 65536}, "transfer_port must be at most 65535"),
        ({"transfer_port": -1}, "transfer_port must be at least 0"),
        ({"transfer_timeout": 0}, "transfer_timeout must be at least"),
        ({"transfer_failure": "shrug"}, "transfer_failure must be one of recompute, refuse"),
        ({"transfer_peers": "10.0.0.0/8, here"}, "transfer_peers must be networks like"),
        ({"role": "prefill", "transfer_host": "10.1.1.1"}, "transfer_secret_file is needed"),
        ({"role": "prefill", "transfer_host": "prefill.local"}, "transfer_secret_file is needed"),
        ({"role": "prefill", "transfer_host": "0.0.0.0", "transfer_secret_file": "s"}, "transfer_advertise is needed"),
        ({"role": "prefill", "transfer_host": "::", "transfer_secret_file": "s"}, "transfer_advertise is needed"),
        ({"role": "decode", "transfer_peers": "127.0.0.0/8,10.0.0.0/8"}, "transfer_secret_file is needed"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DisaggConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"role": "prefill", "transfer_host": "localhost"},
        {"role": "prefill", "transfer_host": "::1"},
        {"role": "prefill", "transfer_host": "10.1.1.1", "transfer_secret_file": "s"},
        {"role": "decode", "transfer_peers": "127.0.0.1, ::1"},
        {"role": "decode", "transfer_peers": "10.0.0.0/8", "transfer_secret_file": "s"},
        {"transfer_host": "0.0.0.0", "transfer_peers": "10.0.0.0/8"},
    ],
)
def test_settings_that_can_be(settings: dict[str, str]) -> None:
    assert DisaggConfig(**settings).role == settings.get("role", "both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "loopback"),
    [
        ({"role": "prefill"}, True),
        ({"role": "prefill", "transfer_host": "10.1.1.1", "transfer_secret_file": "s"}, False),
        ({"role": "decode"}, True),
        ({"role": "decode", "transfer_peers": "127.0.0.0/8,10.0.0.0/8", "transfer_secret_file": "s"}, False),
    ],
)
def test_nixl_opens_ports_where_peers_are(
    settings: dict[str, str], loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ports ask for no secret; those of loopback alone reach no peer elsewhere."""
    made: list[bool] = []

    class Agent:
        def __init__(self, *, loopback: bool) -> None:
            made.append(loopback)

        def close(self) -> None:
            pass

    monkeypatch.setattr(registry, "NixlAgent", Agent)
    monkeypatch.setattr(registry, "TcpGiver", lambda *_: None)
    config, way = DisaggConfig(transfer_engine="nixl", **settings), registry.TRANSFER_ENGINES["nixl"]  # type: ignore[arg-type]
    way.check(config)
    if config.role == "prefill":
        way.giver(config, b"", "id", dict)
    else:
        way.taker(config, b"", dict).close()
    assert made == [loopback] * 2
