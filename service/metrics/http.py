"""The HTTP server of the metrics port: its own threads, so that the event loop and a scraper never stall each other.

Connections are bounded in number and in time (`connections`). A page whose browser stops reading costs one place for
seconds.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AI_PASSIVE, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry

from core.errors import StartupError
from service.metrics.connections import MAX_CONNECTIONS, Connections, RequestStream, hung_up_within
from service.metrics.exposition import Exposition
from service.metrics.peer_user import user_of
from service.metrics.trace import PATH, Refusal, TraceDoor
from service.metrics.visitors import why_not
from service.page import door as page
from service.process.audit_log import Floods

log = logging.getLogger(__name__)

CONNECTION_TIMEOUT_SECONDS = 5.0
"""Seconds that one write may take."""
ACCEPT_AGAIN_SECONDS = 0.05
EVENTS_BUFFER_BYTES = 64 * 1024
"""Bytes that the system holds for a page that does not read; when they are full the next write waits, and times out."""

MAX_REASON_CHARS = 200

NO_HEADERS: Mapping[str, str] = {}


class _Handler(BaseHTTPRequestHandler):
    """GET /metrics, GET /ui if the page is on, and POST /trace if the server has a `TraceDoor`."""

    server: _Server
    timeout = CONNECTION_TIMEOUT_SECONDS
    server_version = "slipstream"
    sys_version = ""

    def setup(self) -> None:
        """Read from a `RequestStream`, which bounds the time of the whole request."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(RequestStream(self.connection))

    def parse_request(self) -> bool:
        """Parse the request, and refuse it for its `Host` or origin (`visitors.why_not`), whatever its method."""
        if not super().parse_request():
            return False
        self.server.connections.heard(self.connection)
        refused = why_not(self.command, self.headers, self.server.names)
        if refused is not None:
            self._refuse(HTTPStatus.FORBIDDEN, refused)
        return refused is None

    def do_GET(self) -> None:
        """Render the registry in the format that the Accept header asks for, or show the page."""
        path = self.path.partition("?")[0]
        if page.is_below(path):
            self._page(path)
        elif path == "/metrics":
            self._metrics()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "only /metrics is served here")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Record a trace and send it piece by piece; the end of the connection is the end of the trace."""
        path, _, query = self.path.partition("?")
        if path == "/metrics" or page.is_below(path):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only read, please", {"Allow": "GET, HEAD"})
            return
        if path != PATH or self.server.trace is None:
            self._refuse(HTTPStatus.NOT_FOUND, "nothing here takes a POST")
            return
        found = self.server.trace.record(
            self.client_address[0],
            query,
            lambda: user_of(self.client_address, self.server.server_port),
            partial(hung_up_within, self.connection),
        )
        if isinstance(found, Refusal):
            self._refuse(found.status, found.message)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        for piece in found:
            self.wfile.write(piece)

    def _metrics(self) -> None:
        try:
            text, content_type = self.server.exposition.text(self.headers.get("Accept", ""))
        except Exception as error:
            self.server.tell_unwritten(error)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics cannot be written; the log says why")
            return
        self._answer(HTTPStatus.OK, text, content_type)

    def _page(self, path: str) -> None:
        door = self.server.page
        if door is None:
            self._refuse(HTTPStatus.NOT_FOUND, page.OFF)
        elif path == page.EVENTS:
            self._events(door)
        elif (document := door.document(path)) is not None:
            self._answer(HTTPStatus.OK, document.body, document.content_type, page.HEADERS)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "the page has no such part", page.HEADERS)

    def _events(self, door: page.PageDoor) -> None:
        """Events until the browser goes, stops reading, or the server closes."""
        watcher = door.feed.watch()
        if watcher is None:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, page.FULL, page.HEADERS)
            return
        with watcher:
            self.connection.setsockopt(SOL_SOCKET, SO_SNDBUF, EVENTS_BUFFER_BYTES)
            self._begin(HTTPStatus.OK, "text/event-stream", {**page.HEADERS, "Cache-Control": "no-store"})
            if self.command != "HEAD":
                for event in watcher:
                    self.wfile.write(event)

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._begin(status, content_type, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, content_type: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: HTTPStatus, message: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._answer(status, (message + "\n").encode(), "text/plain; charset=utf-8", headers)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line for each scrape would be of no use."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        trace: TraceDoor | None,
        door: page.PageDoor | None,
        names: frozenset[str],
    ) -> None:
        self.exposition = Exposition(registry)
        self.trace, self.page, self.names = trace, door, names
        self.connections = Connections()
        self._floods = Floods()
        # A name can stand for an IPv4 or an IPv6 address, and the socket must be of that family.
        self.address_family = getaddrinfo(*address, type=SOCK_STREAM, flags=AI_PASSIVE)[0][0]
        super().__init__(address, _Handler)

    def tell_unwritten(self, error: Exception) -> None:
        """Log why the metrics cannot be written; not each time, since scrapers ask every few seconds."""
        kind = type(error).__name__
        if self._floods.admits(kind):
            log.error("the metrics cannot be written: %s: %s", kind, ascii(str(error))[:MAX_REASON_CHARS])

    def server_bind(self) -> None:
        """Bind without asking DNS for the host's full name, which the base class does and which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], int(self.server_address[1])  # type: ignore[assignment]

    def get_request(self) -> tuple[socket, Any]:
        """Accept a connection. Without a free descriptor that fails at once, so wait ACCEPT_AGAIN_SECONDS then."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_AGAIN_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, in another's place if none is free; close it if threads are too many."""
        if not self.connections.enter(request, client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could be started, so none gives the place back.
            self.connections.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, then give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave(request)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Log nothing: a scraper that closed its connection is no error of the server."""


class MetricsServer:
    """Serves `registry`, traces of `trace` and the page of `door` on `host:port` from a daemon thread; port 0 is any.

    `names` are allowed in `Host`, beside addresses and names without a dot. Raises StartupError for a taken port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        trace: TraceDoor | None = None,
        door: page.PageDoor | None = None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._door = door
        try:
            self._server = _Server((host, port), registry, trace, door, names)
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
        """Stop listening, end the pages and wait 2 s at most for the thread. Other connections end by their timeout."""
        if self._door is not None:
            self._door.feed.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)
