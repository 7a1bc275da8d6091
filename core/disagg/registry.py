"""Ways for keys to travel, by name (`transfer_engine`). A new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.disagg.interface import Facts, Giver, Taker
from core.disagg.tcp_giver import TcpGiver
from core.disagg.tcp_taker import TcpTaker
from core.disagg_config import DisaggConfig
from core.errors import ConfigError

LEAST_SECRET: Final = 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class TransferEngine:
    """How to make the two sides of one way."""

    giver: Callable[[DisaggConfig, bytes, str, Callable[[], Facts]], Giver]
    """Of (configuration, shared secret, id of the engine, what it must have in common with others)."""
    taker: Callable[[DisaggConfig, bytes, Callable[[], Facts]], Taker]


def _tcp_giver(config: DisaggConfig, secret: bytes, engine_id: str, facts: Callable[[], Facts]) -> Giver:
    bound, timeout = (config.transfer_host, config.transfer_port), config.transfer_timeout
    return TcpGiver(bound, config.transfer_advertise, secret, engine_id, facts, timeout)


def _tcp_taker(config: DisaggConfig, secret: bytes, facts: Callable[[], Facts]) -> Taker:
    return TcpTaker(config.networks, secret, facts, config.transfer_timeout)


TRANSFER_ENGINES: Final = {"tcp": TransferEngine(_tcp_giver, _tcp_taker)}


def transfer_engine(config: DisaggConfig) -> TransferEngine:
    """The way of `config`. Raises ConfigError for a name that is none."""
    found = TRANSFER_ENGINES.get(config.transfer_engine)
    if found is None:
        named = ", ".join(TRANSFER_ENGINES)
        raise ConfigError(f"transfer_engine must be one of {named}; got {config.transfer_engine!r}")
    return found


def read_secret(config: DisaggConfig) -> bytes:
    """The shared secret; empty without one. Raises ConfigError for a file that has none of LEAST_SECRET bytes."""
    if config.transfer_secret_file is None:
        return b""
    try:
        secret = Path(config.transfer_secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"transfer_secret_file: {error.strerror}: {config.transfer_secret_file}") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"transfer_secret_file: a secret has at least {LEAST_SECRET} bytes; this one {len(secret)}")
    return secret
