"""Visitors of the metrics port: the names in `Host` that they may use, and the requests that other sites may not make.

A name that an attacker owns can point to this machine (DNS rebinding). A page of the attacker then reads this port
through the browser of the person that opened the page. To that browser all of it is one origin. Such a GET has no
`Origin`, and no `Sec-Fetch-` header either, which browsers send to https and to localhost alone. Only the name in
`Host` tells it from a scraper's, so that name is checked for each request. An attacker cannot register an address,
localhost or a name without a dot; other names must be listed (`--metrics-names`).
"""

from __future__ import annotations

import re
import socket
from email.message import Message
from ipaddress import ip_address
from urllib.parse import urlsplit

LOCAL = "localhost"

_HOST = re.compile(r"(\[[0-9a-f:.]+(?:%[a-z0-9_.-]+)?\]|[^\s:/?#@\[\]\\]+)(?::[0-9]*)?", re.IGNORECASE)
"""A name or an address, and a port."""


def why_not(method: str, headers: Message, names: frozenset[str]) -> str | None:
    """The reason for which a request is refused; None if it is not.

    `names` are those of `--metrics-names`, in lower case; a name with a leading dot also stands for all names below it.
    A request without `Host`, of HTTP/1.0, is allowed: no browser sends one.
    """
    hosts = headers.get_all("Host", [])
    if len(hosts) > 1 or not all(_is_known(_host(host), names) for host in hosts):
        return "open this port by its address or as localhost, or list its name in --metrics-names"
    if method in ("GET", "HEAD"):
        return None
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site in ("cross-site", "same-site"):
        return "another site asks for it"
    if origin is not None and not (hosts and _is_of(origin, hosts[0], names)):
        return "a page of another origin asks for it"
    return None


def _is_known(host: str | None, names: frozenset[str]) -> bool:
    if host is None:
        return False
    if "." not in host and ":" not in host:
        return True
    if host.endswith(f".{LOCAL}") or host == socket.gethostname().lower() or _is_listed(host, names):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_listed(host: str, names: frozenset[str]) -> bool:
    return any(host == name.lstrip(".") or (name.startswith(".") and host.endswith(name)) for name in names)


def _is_of(origin: str, host: str, names: frozenset[str]) -> bool:
    """Whether `origin` is this server: the name and port in `host`, or, behind a proxy, a listed name."""
    try:
        place = urlsplit(origin)
    except ValueError:
        return False
    if place.scheme not in ("http", "https"):
        return False
    return place.netloc.lower() == host.strip().lower() or _is_listed(_host(place.netloc) or "", names)


def _host(given: str) -> str | None:
    """The name or address in `name:port`, in lower case, without brackets and the dot of the root."""
    found = _HOST.fullmatch(given.strip())
    return None if found is None else found[1].strip("[]").removesuffix(".").lower()
