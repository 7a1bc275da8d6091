"""The gRPC channel arguments of the server, each with the reason it is not the default."""

from __future__ import annotations

from service.config.server_config import ServerConfig

MAX_METADATA_BYTES = 8 * 1024
MAX_PENDING_REQUESTS = 1 << 20
UNREAD_BYTES = 16 * 1024
"""Flow-control window of a call: the bytes of a message that gRPC takes in before the handler asks for it."""
HANDSHAKE_TIMEOUT_MS = 10_000
MAX_CONNECTION_IDLE_MS = 5 * 60 * 1000
MIN_PING_INTERVAL_MS = 10_000
FOREVER_MS = 2**31 - 1


def server_options(
    config: ServerConfig, *, shared_port: bool = False, largest_message: int | None = None
) -> tuple[tuple[str, int], ...]:
    """Arguments for `grpc.aio.server`. With `shared_port`, several front ends listen on one port.

    `largest_message` is in bytes; without it the configured limit holds. gRPC refuses a larger message by its header.
    """
    return (
        # Without this, a second server on the port would silently share its connections.
        ("grpc.so_reuseport", int(shared_port)),
        # Calls that Python has not seen yet. At the defaults (1,000 and 3,000) gRPC drops some beyond the first, at
        # random, without a reason and from any caller. Their number is bounded by what a connection may open, and
        # `RequestReads` refuses with a hint when to come back.
        ("grpc.server.max_pending_requests", MAX_PENDING_REQUESTS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_REQUESTS),
        # By default the window of every call grows with the speed of its connection, to megabytes that no handler has
        # asked for: 192 calls held 800 MB so. A message that a handler asks for gets room whatever this says.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        # The default is 2^32: a flood of resets then costs every other client its latency. Nor may it be low. A client
        # opens its next call the moment that one ends, the server has not freed that one yet, and gRPC refuses what is
        # beyond, at random (UNAVAILABLE, in no metric). At 256 a client with 300 calls in hand lost 1.2 % of them. That
        # refusal can be switched off, but it is what bounds resets: four connections made 3.7 GB of them without it.
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        # The keepalive timeout alone does nothing in grpcio: only the ping timeout notices a frozen client.
        ("grpc.keepalive_time_ms", _millis(config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", _millis(config.keepalive_timeout)),
        ("grpc.http2.ping_timeout_ms", _millis(config.keepalive_timeout)),
        ("grpc.http2.max_pings_without_data", 0),
        # Gateways ping every 30 seconds, between calls too; by default that is answered by closing the connection.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_connection_idle_ms", MAX_CONNECTION_IDLE_MS),
        # A client whose connection lives for ever never learns of servers that joined since. gRPC spreads the age by a
        # tenth. Calls that are open at that age stay as long as they take.
        ("grpc.max_connection_age_ms", _millis(config.max_connection_age) if config.max_connection_age else FOREVER_MS),
        ("grpc.max_connection_age_grace_ms", FOREVER_MS),
        ("grpc.max_receive_message_length", largest_message or config.max_receive_bytes),
        # Messages that are sent are bounded by the engine's own limits and by `service.wire.generate.split`.
        ("grpc.max_send_message_length", -1),
        # Both limits are the same: between a soft and an absolute limit gRPC refuses some calls, at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    )


def _millis(seconds: float) -> int:
    return max(1, round(seconds * 1000))
