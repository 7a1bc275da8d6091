"""Ways for keys to travel, by name (`transfer_engine`). A new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from core.disagg.carrier import Receiver, Sender
from core.disagg.interface import Facts, Giver, Taker
from core.disagg.nixl_agent import NixlAgent
from core.disagg.over_nixl import NixlReceiver, NixlSender
from core.disagg.tcp_giver import TcpGiver, listener
from core.disagg.tcp_taker import TcpTaker
from core.disagg_config import DisaggConfig, is_loopback
from core.errors import ConfigError
from core.secret_file import read_secret

SECRET: Final = "transfer_secret_file"
"""The setting."""


@dataclass(frozen=True, slots=True)
class TransferEngine:
    """How to make the two sides of one way."""

    giver: Callable[[DisaggConfig, bytes, str, Callable[[], Facts]], Giver]
    """Of (configuration, shared secret, id of the engine, what it must have in common with others)."""
    taker: Callable[[DisaggConfig, bytes, Callable[[], Facts]], Taker]
    package: str = ""
    """What it needs beside ours, which is an extra of the same name; empty for none."""
    check: Callable[[DisaggConfig], None] = lambda _: None
    """Raises ConfigError where it does not work here, as far as that shows without a peer."""


def _giver(
    config: DisaggConfig, secret: bytes, engine_id: str, facts: Callable[[], Facts], sender: Sender | None = None
) -> Giver:
    bound, timeout = (config.transfer_host, config.transfer_port), config.transfer_timeout
    return TcpGiver(bound, config.transfer_advertise, secret, engine_id, facts, timeout, sender)


def _taker(config: DisaggConfig, secret: bytes, facts: Callable[[], Facts], receiver: Receiver | None = None) -> Taker:
    return TcpTaker(config.networks, secret, facts, config.transfer_timeout, receiver)


def _is_local(config: DisaggConfig) -> bool:
    """Whether peers are on this machine alone."""
    if config.role == "prefill":
        return is_loopback(config.transfer_host)
    return all(each.is_loopback for each in config.networks)


def _nixl_giver(config: DisaggConfig, secret: bytes, engine_id: str, facts: Callable[[], Facts]) -> Giver:
    agent = NixlAgent(loopback=_is_local(config))
    return _giver(config, secret, engine_id, facts, NixlSender(agent))


def _nixl_taker(config: DisaggConfig, secret: bytes, facts: Callable[[], Facts]) -> Taker:
    agent = NixlAgent(loopback=_is_local(config))
    return _taker(config, secret, facts, NixlReceiver(agent))


def _nixl_works(config: DisaggConfig) -> None:
    NixlAgent(loopback=_is_local(config)).close()


TRANSFER_ENGINES: Final = {
    "tcp": TransferEngine(_giver, _taker),
    "nixl": TransferEngine(_nixl_giver, _nixl_taker, "nixl", _nixl_works),
}


def transfer_engine(config: DisaggConfig) -> TransferEngine:
    """The way of `config`. Raises ConfigError for a name that is none, and for a package that is not installed."""
    found = TRANSFER_ENGINES.get(config.transfer_engine)
    if found is None:
        named = ", ".join(TRANSFER_ENGINES)
        raise ConfigError(f"transfer_engine must be one of {named}; got {config.transfer_engine!r}")
    if found.package and find_spec(found.package) is None:
        need = f"needs a package that is not installed: pip install 'slipstream[{found.package}]'"
        raise ConfigError(f"transfer_engine {config.transfer_engine} {need}")
    return found


def check_transfers(config: DisaggConfig) -> None:
    """Before weights are loaded for minutes. Raises ConfigError, and StartupError for an address in use."""
    transfer_engine(config).check(config)
    read_secret(SECRET, config.transfer_secret_file)
    if config.role == "prefill":
        listener((config.transfer_host, config.transfer_port)).close()
