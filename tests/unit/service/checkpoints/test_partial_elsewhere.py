"""Hubs send large files from another host, by a redirect: the token of the hub does not go there, and parts do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from service.checkpoints.byte_progress import ByteProgress
from service.checkpoints.partial import PartialFile

DATA = os.urandom(300_000)
TOKEN = "Bearer secret"
Asked = list[tuple[str | None, str | None]]
"""(authorization, range) of each request."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


class Noting(BaseHTTPRequestHandler):
    asked: Asked

    def log_message(self, *_: object) -> None:
        pass

    def note(self) -> int:
        """The first byte that is asked for."""
        part = self.headers.get("Range")
        self.asked.append((self.headers.get("Authorization"), part))
        return int(part.removeprefix("bytes=").partition("-")[0]) if part else 0


@pytest.mark.parametrize("present", [0, 100_000])
def test_the_token_stays_with_the_hub(present: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    of_hub: Asked = []
    of_host: Asked = []

    class Host(Noting):
        asked = of_host

        def do_GET(self) -> None:
            start = self.note()
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(DATA) - start))
            self.end_headers()
            self.wfile.write(DATA[start:])

    with serving(Host) as port:

        class Hub(Noting):
            asked = of_hub

            def do_GET(self) -> None:
                self.note()
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{port}/signed")
                self.send_header("Content-Length", "0")
                self.end_headers()

        with serving(Hub) as hub:
            file = PartialFile("w", f"http://127.0.0.1:{hub}/w", len(DATA), tmp_path / "blobs" / "etag", tmp_path / "l")
            file.blob.parent.mkdir()
            file.part.write_bytes(DATA[:present])
            file.fetch({"authorization": TOKEN}, ByteProgress("stage", len(DATA), present, None))
    part = f"bytes={present}-" if present else None
    assert file.blob.read_bytes() == DATA
    assert of_hub == [(TOKEN, part)] and of_host == [(None, part)]
