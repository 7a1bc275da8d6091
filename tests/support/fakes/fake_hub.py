"""A hub on this machine that speaks the protocol of Hugging Face's, as far as downloads of a model need it.

What it was asked is kept, and it can refuse, ask for a token, and hang up in the middle of a file.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class FakeHub:
    """Serves `files` as the model `repo`, under the branch `main` and its commit. Attributes may change meanwhile."""

    repo: str
    files: dict[str, bytes]
    token: str | None = None
    """Asked for; None: everybody may read."""
    gated: bool = False
    status: int | None = None
    """With which everything is refused."""
    cut_after: int | None = None
    """Bytes of an answer after which the connection is closed, once."""
    status_after_cut: int | None = None
    """`status` from then on."""
    held: threading.Event | None = None
    """Until it is set, no file is sent."""
    lies: dict[str, int] = field(default_factory=dict)
    """Sizes of files that it links to, told instead of theirs."""
    etags: dict[str, str] = field(default_factory=dict)
    """Etags of files, told instead of the SHA-1 of their bytes."""
    pace: float = 0.0
    """Seconds after each kB of a file; 0: as fast as it can."""
    ranges: bool = True
    """Whether parts of files are sent; without, the whole file is."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range) of each request."""
    endpoint: str = ""

    @classmethod
    def of(cls, repo: str, directory: Path, **extra: bytes) -> FakeHub:
        """With the files of a checkpoint and `extra` ones, in whose names `__` stands for a dot."""
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        return cls(repo, files | {name.replace("__", "."): data for name, data in extra.items()})

    def fetched(self) -> list[str]:
        """Names of files that were asked for by GET, in order of their names."""
        return sorted(
            {path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path}
        )

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        """Answer on a port of this machine."""
        hub = self

        class Handler(_Handler):
            served = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        hub = self.served
        hub.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if hub.status is not None:
            return self._refuse(hub.status, "")
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound")
        api, file = _API.match(self.path), _FILE.match(self.path)
        found = api or file
        if found is None or found[1] != hub.repo:
            return self._refuse(404, "RepoNotFound")
        if (found[3] if api else found[2]) not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if api is not None:
            listed = {"id": hub.repo, "sha": COMMIT, "siblings": []} if api[2] == "revision" else self._tree()
            return self._send(json.dumps(listed).encode(), {"Content-Type": "application/json"}, body)
        if hub.gated:
            return self._refuse(403, "GatedRepo")
        assert file is not None
        return self._send_file(file[3], body)

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.served.files.items()
        ]

    def _send_file(self, name: str, body: bool) -> None:
        data = self.served.files.get(name)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        linked = self.served.lies.get(name)
        if body and self.served.held is not None:
            self.served.held.wait()
        etag = self.served.etags.get(name) or hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers |= {} if linked is None else {"X-Linked-Size": str(linked)}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not self.served.ranges:
            return self._send(data, headers, body)
        first = int(asked[1])
        headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        return self._send(data[first:], headers, body, 206)

    def _send(self, data: bytes, headers: dict[str, str], body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        cut = self.served.cut_after
        if cut is not None and len(data) > cut and "ETag" in headers:
            self.served.cut_after, self.served.status = None, self.served.status_after_cut
            self.close_connection = True
            data = data[:cut]
        self._write(data, self.served.pace if "ETag" in headers else 0.0)

    def _write(self, data: bytes, pace: float) -> None:
        step, waits = 1000 if pace else max(1, len(data)), threading.Event()
        with suppress(ConnectionError):
            for place in range(0, len(data), step):
                self.wfile.write(data[place : place + step])
                waits.wait(pace)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
