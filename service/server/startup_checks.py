"""Start-up errors that can be found in milliseconds, before anything heavy is imported: taken ports, unusable files.

The files are those of the checkpoint, the adapters, the tokens, the tenants and TLS. Every StartupError here is one
line for the operator and may name a path. The loaders check again, and more.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError, StartupError
from service.access.tenant_file import tenants_file
from service.access.tls_files import tls_files
from service.access.token_file import token_file
from service.checkpoints.files import check_model, check_shard
from service.checkpoints.model_name import hub_model
from service.config.server_config import ServerConfig
from service.tracing.endpoint import otlp_endpoint

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def check(config: ServerConfig) -> None:
    """Check the OTLP endpoint, ports, access files, checkpoint and adapters. Raises StartupError.

    The files of a model of a hub are checked when they have come. A machine that serves nothing has no ports.
    """
    if config.engine.nodes.node_rank == 0:
        otlp_endpoint(config.otlp_endpoint, os.environ)
        check_ports(config)
        check_security(config)
    if hub_model(config.engine.model.path) is None:
        check_model(config.model_path)
    check_adapters(config)


def check_ports(config: ServerConfig) -> None:
    """Raise StartupError if the gRPC, the metrics or the health port cannot be bound, or a host is no address here."""
    for purpose, setting, host, port in (
        ("gRPC", "--host", config.host, config.port),
        ("metrics", "--metrics-host", config.metrics_host, config.metrics_port),
        ("health", "--host", config.host, config.health_port),
    ):
        if port is not None:
            _probe(purpose, setting, host, port)


def _probe(purpose: str, setting: str, host: str, port: int) -> None:
    """Bind the port and close it. Without SO_REUSEPORT, so that a second server on the port fails to start.

    A name can stand for several addresses. gRPC listens on those that are this machine's, so one that can be bound is
    enough; but a port that is taken on any of them is an error.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"{setting} {host}: the name cannot be resolved ({getattr(error, 'strerror', None) or error}); give an"
            " address of this machine, or 0.0.0.0 or :: for all of them"
        ) from None
    failures = [failure for failure in map(_bind_failure, found) if failure is not None]
    taken = [failure for failure in failures if failure.errno == errno.EADDRINUSE]
    if len(failures) < len(found) and not taken:
        return
    worst = (taken or failures)[0]
    reason = (worst.strerror or str(worst)).lower()
    advice = f"; {setting} takes an address of this machine" if worst.errno == errno.EADDRNOTAVAIL else ""
    raise StartupError(f"cannot listen on {host}:{port} ({purpose}): {reason}{advice}")


def _bind_failure(found: Any) -> OSError | None:
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def check_security(config: ServerConfig) -> None:
    """Raise StartupError if the token file, the tenants file or a TLS file cannot be used."""
    if config.auth_token_file is not None:
        token_file(config.auth_token_file)
    if config.tenants_file is not None:
        tenants_file(config.tenants_file)
    tls_files(config)


def check_adapters(config: ServerConfig) -> None:
    """Raise ModelLoadError if an adapter's files are not there or cut short, or `lora_dir` is no directory."""
    for name, directory in config.engine.lora.adapters:
        told = f"adapter {name!r} from {directory}"
        for file in ADAPTER_FILES:
            if not Path(directory, file).is_file():
                raise ModelLoadError(f"{told}: it has no {file}, so it is no PEFT adapter")
        try:
            check_shard(Path(directory, ADAPTER_FILES[-1]))
        except ModelLoadError as error:
            raise ModelLoadError(f"{told}: {error.message}") from None
    if config.engine.lora.directory is not None and not Path(config.engine.lora.directory).is_dir():
        raise ModelLoadError(f"lora_dir {config.engine.lora.directory} is no directory")
