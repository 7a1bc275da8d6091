"""Whether this engine only prefills or decodes for others, and how keys and values go between the two."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from core.errors import ConfigError
from core.setting import check_settings, setting

ROLES = ("both", "prefill", "decode")
FAILURES = ("recompute", "refuse")
LOOPBACK = "127.0.0.0/8,::1/128"
MAX_PORT = 65535
GROUP = "Disaggregation"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class DisaggConfig:
    """One role of prefill/decode disaggregation. A gateway in front pairs engines of the two roles."""

    role: str = setting(
        "both",
        GROUP,
        "What a gateway has this server do: both phases of a request, prefill for others, or decode what others have "
        "prefilled. Each role also serves whole requests.",
        choices=ROLES,
    )
    transfer_engine: str = setting(
        "tcp", GROUP, "How keys and values travel: tcp, or nixl (RDMA, shared memory or TCP; the extra nixl)."
    )
    transfer_host: str = setting(
        "127.0.0.1", GROUP, "Address at which a server that prefills gives them away; not loopback: needs a secret."
    )
    transfer_port: int = setting(0, GROUP, "Its port, which an SGLang gateway is told; 0 picks a free one.", low=0)
    transfer_advertise: str | None = setting(
        None,
        GROUP,
        "Name or address by which servers that decode reach it; unset: transfer_host.",
        metavar="HOST",
    )
    transfer_peers: str = setting(
        LOOPBACK,
        GROUP,
        "Networks, with commas, from which a server that decodes fetches: requests name the address.",
        metavar="NETWORKS",
    )
    transfer_secret_file: str | None = setting(
        None, GROUP, "File with a secret of 16 bytes or more that both roles share.", metavar="FILE"
    )
    transfer_timeout: float = setting(
        30.0, GROUP, "Seconds without progress after which a transfer is given up, and what waits for it.", low=0.05
    )
    transfer_failure: str = setting(
        "recompute",
        GROUP,
        "What becomes of a request whose keys do not arrive: its prompt is computed here, or it is refused.",
        choices=FAILURES,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.transfer_port > MAX_PORT:
            raise ConfigError(f"transfer_port must be at most {MAX_PORT}")
        networks = self.networks
        if self.role == "prefill" and self.transfer_advertise is None and is_wildcard(self.transfer_host):
            raise ConfigError(
                f"transfer_host {self.transfer_host} is no address to reach: transfer_advertise is needed"
            )
        if self.role == "prefill" and self.transfer_secret_file is None and not is_loopback(self.transfer_host):
            raise ConfigError("transfer_host is not loopback: transfer_secret_file is needed")
        if self.role == "decode" and self.transfer_secret_file is None and not all(n.is_loopback for n in networks):
            raise ConfigError("transfer_peers are beyond this machine: transfer_secret_file is needed")

    @property
    def networks(self) -> tuple[Network, ...]:
        """`transfer_peers`. Raises ConfigError."""
        listed = [each.strip() for each in self.transfer_peers.split(",") if each.strip()]
        try:
            return tuple(ipaddress.ip_network(each, strict=False) for each in listed)
        except ValueError as error:
            raise ConfigError(f"transfer_peers must be networks like 10.0.0.0/8: {error}") from None


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine connects to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
