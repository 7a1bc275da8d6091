"""The HTTP server of the metrics port: its own threads, so that the event loop and a scraper never stall each other.

Connections are bounded in number and in time: a scraper that connects and never speaks costs one slot for seconds.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from core.errors import StartupError
from service.metrics.trace import PATH, Refusal, TraceDoor

MAX_CONNECTIONS = 16
CONNECTION_TIMEOUT_SECONDS = 5.0


class _Handler(BaseHTTPRequestHandler):
    """GET /metrics, and POST /trace if there is somebody to record it."""

    server: _Server
    timeout = CONNECTION_TIMEOUT_SECONDS
    server_version = "slipstream"
    sys_version = ""

    def do_GET(self) -> None:
        """Render the registry in the format that the Accept header asks for."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is served here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Record a trace and send it as it is written; the end of the connection is its end."""
        path, _, query = self.path.partition("?")
        if path != PATH or self.server.trace is None:
            self.send_error(404, "nothing here takes a POST")
            return
        found = self.server.trace.record(self.client_address[0], query)
        if isinstance(found, Refusal):
            body = (found.message + "\n").encode()
            self.send_response(found.status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        for piece in found:
            self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: one line per scrape helps nobody."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, trace: TraceDoor | None) -> None:
        self.registry, self.trace = registry, trace
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for the host's full name, which the base class does and which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], int(self.server_address[1])  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a new thread while a slot is free; hang up otherwise."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, then give its slot back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Silent: a scraper that hung up is not our error."""


class MetricsServer:
    """Serves `registry`, and traces of `trace`, on `host:port` from a daemon thread; port 0 picks a free one.

    Raises StartupError if the port is taken.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, trace: TraceDoor | None = None) -> None:
        try:
            self._server = _Server((host, port), registry, trace)
        except OSError as error:
            raise StartupError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="slipstream-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and wait for the thread; open connections are left to their own timeout."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)
