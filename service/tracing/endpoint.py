"""The address to which spans are sent: the flag, else OpenTelemetry's own variables. Found without importing it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping

from core.errors import ConfigError

log = logging.getLogger(__name__)

EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def otlp_endpoint(flag: str | None, env: Mapping[str, str]) -> str | None:
    """The collector's address; None if no spans are wanted. Raises ConfigError for a flag that cannot be followed.

    Environment variables that cannot be followed are only logged: operators of clusters put them into every container.
    """
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if flag is not None:
        if not flag.startswith(("http://", "https://")):
            raise ConfigError("otlp_endpoint must begin with http:// or https://")
        if not _is_installed():
            raise ConfigError("otlp_endpoint needs OpenTelemetry: pip install 'slipstream[otel]'")
        return flag
    endpoint = next((env[name] for name in ENDPOINTS if env.get(name)), None)
    if endpoint is None or env.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = next((env[name] for name in PROTOCOLS if env.get(name)), "grpc")
    if protocol != "grpc":
        log.warning("no spans: OTLP over %s is not spoken here, only grpc", protocol)
        return None
    if not _is_installed():
        log.warning("no spans: OpenTelemetry is not installed; pip install 'slipstream[otel]'")
        return None
    return endpoint


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False
