"""Who may ask the metrics port for what: names that an attacker can own, pages of other origins, and scrapers."""

from __future__ import annotations

import socket
from email.message import Message

import pytest
from prometheus_client import CollectorRegistry

from service.metrics.http import MetricsServer
from service.metrics.visitors import why_not

PATIENCE = 20.0
NAMES = frozenset({"here.example", ".models.svc"})


def refused(method: str = "GET", **headers: str) -> bool:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return why_not(method, message, NAMES) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9464",
        "10.1.2.3:9464",
        "[::1]:9464",
        "[::1]",
        "[FE80::1%eth0]:9464",
        "[::ffff:127.0.0.1]:9464",
        "localhost:9464",
        "LocalHost.",
        "any.localhost:1",
        "slipstream:9464",
        "Here.Example:80",
        "here.example.:9464",
        "models.svc:9464",
        "demo-slipstream-pods.models.svc:9464",
    ],
)
def test_scrapers_come_by_address_by_short_and_by_listed_names(host: str) -> None:
    assert not refused(Host=host)


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:9464",
        "rebound.example.",
        "REBOUND.EXAMPLE:9464",
        "127.0.0.1.rebound.example:9464",
        "rebound.example:9464@localhost",
        "localhost@rebound.example",
        "rebound.example#.localhost",
        "rebound.example/.localhost",
        "rebound.example\\.localhost",
        "nothere.example",
        "sub.here.example",
        "evilmodels.svc",
        "localhost.rebound.example",
        "[::1].rebound.example",
        "127.1.",
        "",
        "a b",
        ":9464",
        "[::1",
    ],
)
def test_a_name_that_anybody_may_own_is_refused_whatever_else_is_said(host: str) -> None:
    """As a rebound page's GET comes: neither `Origin` nor `Sec-Fetch-Site`."""
    assert refused(Host=host)
    assert refused(Host=host, Sec_Fetch_Site="same-origin")


def test_two_names_are_none() -> None:
    message = Message()
    message["Host"], message["host"] = "localhost", "localhost"
    assert why_not("GET", message, NAMES)
    assert why_not("GET", Message(), NAMES) is None, "HTTP/1.0 has none"


@pytest.mark.parametrize(
    ("host", "origin", "let_in"),
    [
        ("127.0.0.1:9464", "http://127.0.0.1:9464", True),
        ("localhost", "http://LOCALHOST", True),
        ("[::1]:9464", "http://[::1]:9464", True),
        ("127.0.0.1:9464", "https://here.example", True),
        ("127.0.0.1:9464", "http://127.0.0.1:3000", False),
        ("127.0.0.1:9464", "http://127.0.0.1", False),
        ("localhost:9464", "http://127.0.0.1:9464", False),
        ("127.0.0.1:9464", "null", False),
        ("127.0.0.1:9464", "", False),
        ("127.0.0.1:9464", "file://", False),
        ("127.0.0.1:9464", "//127.0.0.1:9464", False),
        ("127.0.0.1:9464", "http://[", False),
        ("127.0.0.1:9464", "http://evil.example", False),
    ],
)
def test_a_post_of_another_origin_is_refused(host: str, origin: str, let_in: bool) -> None:
    assert refused("POST", Host=host, Origin=origin) is not let_in
    assert not refused("GET", Host=host, Origin=origin), "a page of another origin cannot read the answer"


def test_a_post_of_another_site_is_refused_and_one_of_a_program_is_not() -> None:
    assert refused("POST", Host="localhost", Sec_Fetch_Site="cross-site")
    assert refused("POST", Host="localhost", Sec_Fetch_Site="same-site")
    assert refused("POST", Origin="http://localhost"), "no name, and a page that has one"
    assert not refused("POST", Host="localhost", Sec_Fetch_Site="same-origin", Origin="http://localhost")
    assert not refused("POST", Host="localhost")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.0\r\nHost: rebound.example\r\n\r\n", b"403"),
        (b"HEAD /metrics HTTP/1.1\r\nHost: rebound.example:9464\r\n\r\n", b"403"),
        (b"POST /trace HTTP/1.1\r\nHost: rebound.example\r\nContent-Length: 99999999999\r\n\r\n", b"403"),
        (b"OPTIONS /trace HTTP/1.1\r\nHost: rebound.example\r\n\r\n", b"403"),
        (b"OPTIONS /trace HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: rebound.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n Host: folded\r\n\r\n", b"403"),
        (b"GET http://rebound.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET //rebound.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"x: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"BREW /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"501"),
    ],
)
def test_one_answer_to_whatever_is_sent(request_line: bytes, status: bytes) -> None:
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(request_line)
            answer = b""
            try:
                while piece := connection.recv(65536):
                    answer += piece
            except ConnectionResetError:
                pass  # what lies unread behind the request
        assert answer.split(b"\r\n")[0].split(b" ")[1:2] == [status], answer[:200]
        assert answer.count(b"HTTP/1.0 ") == 1
    finally:
        server.close()
