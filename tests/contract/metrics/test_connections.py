"""Clients of the metrics port that keep connections and say nothing, or little: scrapers do not notice them."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from service.metrics import connections, exposition, http
from service.metrics.connections import MAX_CONNECTIONS, THREADS_PER_PLACE, Connections
from service.metrics.http import MetricsServer

PATIENCE = 20.0
ANSWER_BYTES = 16 * 1024 * 1024


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    yield made
    made.close()


def connect(server: MetricsServer, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE, source_address=(source, 0))


def scrape(server: MetricsServer) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE) as response:
        return int(response.status)


def test_silent_connections_keep_no_scraper_out_and_do_not_stop_closing(server: MetricsServer) -> None:
    silent = [connect(server, "127.0.0.9") for _ in range(3 * MAX_CONNECTIONS)]
    try:
        for _ in range(20):
            assert scrape(server) == 200
        assert silent[0].recv(1) == b"", "the oldest gave way"
    finally:
        for each in silent:
            each.close()


def test_a_request_that_trickles_in_has_one_time_for_all_of_it(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    with connect(server) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        ended = threading.Event()

        def trickle() -> None:
            while not ended.wait(0.02):
                try:
                    slow.sendall(b"x: y\r\n")
                except OSError:
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            assert slow.recv(1) == b"", "hung up on, though no pause was long"
        except ConnectionResetError:
            pass
        finally:
            ended.set()
            sender.join()


def test_a_request_in_time_may_be_answered_for_longer(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for the request; a page or a trace takes as long as it takes."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.0)
    with connect(server) as late:
        late.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert late.recv(1) == b""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 5.0)
    assert scrape(server) == 200


def pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    return [socket.socketpair() for _ in range(count)]


def hung_up(end: socket.socket) -> bool:
    """Whether the other end was shut down; what is still open has said nothing."""
    with contextlib.suppress(BlockingIOError):
        return end.recv(1, socket.MSG_DONTWAIT) == b""
    return False


def test_the_client_with_most_connections_gives_way() -> None:
    places, held = Connections(most=4), pairs(8)
    (a, _), (b, _), (c, _), (d, _), (e, of_e), (f, _), (g, _), (h, _) = held
    ends = dict(zip("abcdefgh", (other for _, other in held)))
    scraper, flood = "10.0.0.1", "10.0.0.9"
    try:
        assert all(places.enter(one, address) for one, address in ((a, scraper), (b, flood), (c, flood)))
        places.heard(b)
        assert places.enter(d, flood) and places.enter(e, flood)
        assert hung_up(ends["c"]), "the oldest silent one of the flood"
        for one in (a, d, e):
            places.heard(one)
        assert places.enter(f, scraper)
        assert hung_up(ends["b"]), "no silent one is left: the oldest of the client that has most"
        places.leave(a)
        places.leave(a)
        assert places.enter(g, flood), "into the place that was given back"
        of_e.send(b"x")
        assert e.recv(1) == b"x", "whose place nobody took"
        places.heard(f)
        assert places.enter(h, scraper)
        assert hung_up(ends["g"]), "a silent one before those that are answered"
    finally:
        close(held)


def test_a_network_of_ipv6_is_one_client_and_mapped_addresses_are_many() -> None:
    places, held = Connections(most=3), pairs(5)
    try:
        for (one, _), address in zip(held, ("::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2", "::ffff:10.0.0.2")):
            assert places.enter(one, address)
        assert hung_up(held[1][1]), "of the network that has two places"
        assert places.enter(held[4][0], "fe80::1%eth0")
    finally:
        close(held)


def test_threads_whose_place_was_taken_are_bounded() -> None:
    places, held = Connections(most=1), pairs(THREADS_PER_PLACE + 1)
    try:
        *first, (last, _) = held
        assert all(places.enter(one, "10.0.0.1") for one, _ in first)
        assert not places.enter(last, "10.0.0.2"), "none of them has ended yet"
        places.leave(first[0][0])
        assert places.enter(last, "10.0.0.2")
    finally:
        close(held)


def close(held: list[tuple[socket.socket, socket.socket]]) -> None:
    for one, two in held:
        one.close()
        two.close()


BROWSER = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"Host": "metrics.of.a.cluster"}, 403),
        ("GET", {"Host": "rebound.example"}, 403),
        ("GET", {"Host": "here.example"}, 200),
        ("GET", {"Host": "slipstream:9464"}, 200),
        ("GET", {**BROWSER, "Host": "rebound.example"}, 403),
        ("GET", {**BROWSER, "Host": "localhost:9464"}, 200),
        ("GET", {**BROWSER, "Host": "[::1]:9464"}, 200),
        ("GET", {**BROWSER, "Host": "Here.Example:80"}, 200),
        ("GET", {"Sec-Fetch-Site": "cross-site", "Host": "127.0.0.1"}, 200),
        ("POST", {"Origin": "http://127.0.0.1:9464", "Host": "127.0.0.1:9464"}, 404),
        ("POST", {"Origin": "http://127.0.0.1:3000", "Host": "127.0.0.1:9464"}, 403),
        ("POST", {"Origin": "http://evil.example", "Host": "127.0.0.1:9464"}, 403),
        ("POST", {"Origin": "null", "Host": "127.0.0.1:9464"}, 403),
        ("POST", {"Sec-Fetch-Site": "cross-site", "Host": "127.0.0.1:9464"}, 403),
        ("POST", {}, 404),
    ],
)
def test_visitors_come_by_known_names_and_pages_from_no_other_site(
    method: str, headers: dict[str, str], status: int
) -> None:
    """A POST that is let in finds nothing here: 404."""
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), names=frozenset({"here.example"}))
    path = "/metrics" if method == "GET" else "/trace"
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers, method=method)
    try:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                found = response.status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status
    finally:
        server.close()


def wide(_accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """An exposition of more than the system takes for a client that does not read."""
    return lambda _: bytes(ANSWER_BYTES), "text/plain"


def test_clients_that_do_not_read_their_answer_keep_no_scraper_out(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests are there, so that they are no longer silent; they have all places, and read nothing."""
    monkeypatch.setattr(exposition, "choose_encoder", wide)
    monkeypatch.setattr(http._Handler, "timeout", PATIENCE)
    deaf = []
    try:
        for _ in range(MAX_CONNECTIONS):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            one.bind(("127.0.0.9", 0))
            one.connect(("127.0.0.1", server.port))
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            deaf.append(one)
            one.settimeout(PATIENCE)
            assert one.recv(1) == b"H", "it is being answered"
        for _ in range(MAX_CONNECTIONS):
            assert scrape(server) == 200
    finally:
        for one in deaf:
            one.close()


def test_connections_that_no_thread_could_be_started_for_take_no_places(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(http.ThreadingHTTPServer, "process_request", exhausted)
    for _ in range(THREADS_PER_PLACE * MAX_CONNECTIONS + 1):
        with connect(server) as one:
            assert one.recv(1) == b""
    monkeypatch.undo()
    try:
        assert scrape(server) == 200
    except OSError as refused:
        pytest.fail(f"no place is left: {refused}")
