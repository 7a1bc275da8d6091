"""Every setting of the server: one frozen dataclass whose fields are the flags, the environment and the file alike.

Those of the engine are fields of `core.config`, which this one holds.

A field `drain_grace` is `--drain-grace`, `SLIPSTREAM_DRAIN_GRACE` and the key `drain_grace` (or `drain-grace`) of the
YAML file. A flag wins over the environment, that over the file, that over the default. How the values are read is in
`service.config.sources`; this file says only what there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.config import EngineConfig
from core.errors import ConfigError
from core.models.bundled import bundled_model_dir
from core.setting import check_settings, setting
from service.config.sources import with_settings

TRACE_ENDPOINTS = ("off", "local", "any")
UNNAMED_CALLERS = ("generate", "watch", "all")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_PORT = 65535
BUNDLED_NAME = "slipstream-bundled"
REFUSAL_ROOM = 256
ANY_NAME = "*"
MOST_ENGINES = 64


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `slipstream serve` runs with. Raises ConfigError for values that cannot work."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    host: str = setting("127.0.0.1", "Network", "Address of the gRPC port.")
    port: int = setting(50051, "Network", "gRPC port; 0 picks a free one.", low=0)
    metrics_host: str = setting("127.0.0.1", "Network", "Address of the metrics port.")
    metrics_port: int = setting(9464, "Network", "HTTP port of /metrics; 0 picks a free one.", low=0)
    metrics_names: str | None = setting(
        None,
        "Network",
        "Names, with commas, by which the metrics port may be asked, beside addresses, localhost and names without a"
        " dot; .NAME: and all below it.",
        metavar="NAMES",
    )
    health_port: int | None = setting(None, "Network", "Port for health checks alone, never with TLS.", low=0)
    trace_endpoint: str = setting(
        "local",
        "Network",
        "Who may have /trace of the metrics port record what scheduler and device do: no client, the server's user on "
        "its machine, or every client.",
        choices=TRACE_ENDPOINTS,
    )
    ui: bool = setting(
        False, "Network", "Serve a page for people at /ui of the metrics port: load, steps, ids of requests."
    )
    frontends: int = setting(
        0,
        "Network",
        "Processes that serve gRPC in front of the engine's own; 0: the engine's process does.",
        low=0,
    )
    data_parallel: int = setting(
        1,
        "Network",
        "Engines of this server, each a process with the whole model and devices, or cores, of its own. A request goes"
        " to the one that has least to do or knows its prompt; limits of batch, queue and KV cache hold for each.",
        low=1,
    )
    expert_parallel: bool = setting(
        False,
        "Network",
        "Have the engines of data_parallel share the experts of the model: each has a part of them, beside attention, "
        "cache and requests of its own, and all take part in each step of any.",
    )
    reflection: bool = setting(False, "Network", "Serve gRPC reflection, which shows the API to every client.")
    gateway: bool = setting(True, "Network", "Serve the dialects of smg where slipstream[gateway] is installed.")
    gateway_tokenizer: str = setting(
        "zip", "Network", "Gateways are sent the tokenizer, or told its path.", choices=("zip", "path")
    )
    max_concurrent_streams: int = setting(
        1024, "Network", "Most calls open on one connection; beyond, gRPC may refuse some.", low=1
    )
    max_receive_bytes: int = setting(4 * 1024 * 1024, "Network", "Largest request message in bytes.", low=1024)
    keepalive_time: float = setting(30.0, "Network", "Seconds of silence before a client is pinged.", low=0.1)
    keepalive_timeout: float = setting(
        10.0, "Network", "Seconds a client has to answer a ping before it counts as gone.", low=0.1
    )
    max_connection_age: float = setting(
        1800.0,
        "Network",
        "Seconds after which clients are told to connect again, once their calls have ended; 0: never.",
        low=0,
    )

    auth_token_file: str | None = setting(
        None,
        "Security",
        "File of bearer tokens, one a line, also as name:token; unset: every client may call.",
        metavar="FILE",
    )
    auth_recheck_seconds: float = setting(
        30.0, "Security", "Seconds after which a revoked token has ended its streams.", low=0.05
    )
    admins: str | None = setting(
        None,
        "Security",
        "Names of callers, with commas, that load adapters, flush the cache of all tenants, and see the load of all.",
        metavar="NAMES",
    )
    grammar_callers: str | None = setting(
        None,
        "Security",
        "Names of callers, with commas, that may constrain outputs by grammars of their own (ebnf); *: all callers.",
        metavar="NAMES",
    )
    unnamed_callers: str = setting(
        "generate",
        "Security",
        "What callers without a name may do, so without tokens and client certificates all: generate; watch, which "
        "also shows them the prompts and outputs of each other, and flushes the cache; all, adapters included.",
        choices=UNNAMED_CALLERS,
    )
    tenants_file: str | None = setting(
        None,
        "Security",
        "YAML file of limits by name of token or client certificate; unset: callers have no limits of their own.",
        metavar="FILE",
    )
    tls_cert: str | None = setting(
        None, "Security", "Certificate chain of the gRPC port in PEM; unset: no TLS.", metavar="FILE"
    )
    tls_key: str | None = setting(None, "Security", "Its unencrypted private key in PEM.", metavar="FILE")
    tls_client_ca: str | None = setting(
        None,
        "Security",
        "Authorities in PEM, one of which must have signed a client's certificate; unset: clients need none.",
        metavar="FILE",
    )
    tls_client_names: str | None = setting(
        None,
        "Security",
        "Names in client certificates, with commas, that may call; * is every certificate of the authorities.",
        metavar="NAMES",
    )

    max_concurrent_requests: int | None = setting(
        None,
        "Limits",
        "Most Generate, Embed, Classify and Score calls open at once; unset: what batch and queue hold, and 256 more "
        "to refuse.",
        low=1,
    )
    rate_limit: float | None = setting(
        None,
        "Limits",
        "Most Generate, Embed, Classify and Score calls admitted per second; unset: no limit.",
        low=0.001,
    )
    admission_wait: float = setting(
        1.0, "Limits", "Seconds a call waits for either of these limits before it is refused.", low=0.001
    )
    max_text_calls: int = setting(64, "Limits", "Most Tokenize and Detokenize calls of one caller at once.", low=1)
    write_timeout: float = setting(
        10.0, "Limits", "Seconds one write may take before a slow client is evicted.", low=0.01
    )
    max_request_seconds: float | None = setting(
        None,
        "Limits",
        "Longest a Generate, Embed, Classify or Score call may take, whatever its deadline; unset: no limit.",
        low=0.001,
    )

    resume_seconds: float = setting(
        30.0,
        "Resuming",
        "Seconds that a resumable stream without a reader is kept for Attach; 0: none are.",
        low=0,
    )
    resume_bytes: int = setting(
        64 * 1024 * 1024, "Resuming", "Bytes that all kept streams may take beside the engine.", low=4096
    )
    resume_tenant_bytes: int = setting(
        16 * 1024 * 1024, "Resuming", "Bytes that those of one tenant may take.", low=4096
    )

    drain_linger: float = setting(
        5.0,
        "Shutdown",
        "Seconds after SIGTERM in which new requests are still taken (Ctrl-C: none).",
        low=0,
    )
    drain_grace: float = setting(30.0, "Shutdown", "Seconds that running streams then have to finish.", low=0)
    log_level: str = setting("info", "Logging", "Least severity that is logged.", choices=LOG_LEVELS)
    otlp_endpoint: str | None = setting(
        None,
        "Logging",
        "Collector that gets spans of requests over OTLP/gRPC; unset: as the OTEL_* variables say, else none.",
        metavar="URL",
    )

    @classmethod
    def of(cls, **settings: Any) -> ServerConfig:
        """With these settings, by the names of their flags, those of the engine among them."""
        return with_settings(cls, settings)

    def __post_init__(self) -> None:
        check_settings(self)
        if max(self.port, self.metrics_port, self.health_port or 0) > MAX_PORT:
            raise ConfigError(f"port and metrics_port must be at most {MAX_PORT}")
        if self.port and self.port == self.metrics_port and self.host == self.metrics_host:
            raise ConfigError(f"port and metrics_port must differ; both are {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key must be given together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")
        if self.auth_token_file is None and self.tls_client_ca is None:
            for name in ("admins", "tenants_file"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs auth_token_file or tls_client_ca, which say who calls")
            if self.grammar_writers - {ANY_NAME}:
                raise ConfigError("grammar_callers needs auth_token_file or tls_client_ca, which say who calls")
        if self.data_parallel > MOST_ENGINES:
            raise ConfigError(f"data_parallel must be at most {MOST_ENGINES}; got {self.data_parallel}")
        if self.expert_parallel and self.data_parallel == 1:
            raise ConfigError("expert_parallel needs data_parallel: the number of engines that share experts")
        if self.data_parallel > 1 and self.engine.disagg.role != "both":
            raise ConfigError("data_parallel is not possible with role yet: start a server for each engine")
        if self.data_parallel > 1 and self.engine.nodes.nnodes > 1:
            raise ConfigError("data_parallel is not possible with nnodes: start a server for each engine")
        if self.tls_client_ca is None and self.tls_client_names is not None:
            raise ConfigError("tls_client_names needs tls_client_ca")
        if self.tls_client_ca is not None and self.tls_client_names is None:
            raise ConfigError(
                f"tls_client_ca needs tls_client_names: the clients' names, or {ANY_NAME} for all it signed"
            )

    @property
    def concurrency_limit(self) -> int:
        """Most Generate, Embed, Classify and Score calls open at once."""
        # Beyond batch and queue, so that a full queue refuses at once instead of making callers stand in line first.
        return self.max_concurrent_requests or self.max_running + self.max_queued + REFUSAL_ROOM

    @property
    def max_running(self) -> int:
        """Most requests in the batches of all engines."""
        return self.data_parallel * self.engine.memory.max_running_requests

    @property
    def max_queued(self) -> int:
        """Most requests that wait for the batches of all engines."""
        return self.data_parallel * self.engine.scheduler.max_queued_requests

    @property
    def admin_names(self) -> frozenset[str]:
        """Names of callers that may do what concerns all tenants."""
        return _names(self.admins)

    @property
    def grammar_writers(self) -> frozenset[str]:
        """Names of callers that may send grammars, or ANY_NAME."""
        return _names(self.grammar_callers)

    @property
    def client_names(self) -> frozenset[str] | None:
        """Names in client certificates that may call; None: all that the authorities signed."""
        names = _names(self.tls_client_names)
        return None if names == {ANY_NAME} else names

    @property
    def model_path(self) -> Path:
        """The checkpoint to serve: the one asked for, else the bundled one."""
        return Path(self.engine.model.path) if self.engine.model.path else bundled_model_dir()

    def engine_config(self) -> EngineConfig:
        """What the engine is built from: `engine`, with the checkpoint and its name resolved."""
        model = self.engine.model
        name = model.served_name or (None if model.path else BUNDLED_NAME)
        return replace(self.engine, model=replace(model, path=str(self.model_path), served_name=name))


def _names(listed: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (listed or "").split(",") if name.strip())
