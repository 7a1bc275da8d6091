"""The real gateway as a subprocess, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

PATIENCE = 30.0
STEP_SECONDS = 0.05


def program() -> str | None:
    """The `smg` beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("smg")
    return str(beside) if beside.exists() else shutil.which("smg")


needs_smg = pytest.mark.skipif(program() is None, reason="the gateway is not installed: pip install smg==1.13.0")


class Smg:
    """One gateway on free ports, in front of `workers` (host:port); without any, they are added by `add`.

    With `pairs` it has one worker prefill and another one decode. `prefill` are those that it knows from the start,
    with the ports at which keys are fetched from them, and `decode` the others; it speaks SGLang's dialect to both.
    """

    def __init__(
        self,
        folder: Path,
        *workers: str,
        pairs: bool = False,
        prefill: Mapping[str, int] | None = None,
        decode: Sequence[str] = (),
        **flags: Any,
    ) -> None:
        self.port = free_port()
        self._log = (folder / f"smg-{self.port}.log").open("w+")
        defaults = {
            "host": "127.0.0.1",
            "port": self.port,
            "prometheus_host": "127.0.0.1",
            "prometheus_port": free_port(),
            "worker_startup_check_interval": 1,
            "policy": "round_robin",
            "retry_max_retries": 2,
            "retry_initial_backoff_ms": 10,
            "log_level": "info",
        }
        named = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in (defaults | flags).items()
        ]
        where = ["--worker-urls", *(f"grpc://{each}" for each in workers)] if workers else []
        for worker, port in (prefill or {}).items():
            where += ["--prefill", f"grpc://{worker}", str(port)]
        for worker in decode:
            where += ["--decode", f"grpc://{worker}"]
        where = (where or ["--enable-igw"]) + ["--pd-disaggregation"] * pairs
        binary = program()
        assert binary, "tests are marked needs_smg"
        self._process = subprocess.Popen(
            [binary, "launch", *named, *where],
            # It would ask the internet for a tokenizer that it cannot find.
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def url(self) -> str:
        """Where OpenAI's clients go."""
        return f"http://127.0.0.1:{self.port}/v1"

    def add(self, worker: str, runtime: str, role: str = "regular") -> None:
        """Take a worker in, in the dialect `runtime`, for whole requests unless `role` says prefill or decode."""
        self.wait(lambda: self.ask("GET", "/liveness")[0] == 200)
        asked = {"url": f"grpc://{worker}", "runtime_type": runtime, "worker_type": role}
        status, _ = self.ask("POST", "/workers", asked)
        assert status == 202

    def wait_ready(self, workers: int = 1) -> Smg:
        """Until so many workers are ready and the tokenizer is there, without which requests get 503."""
        self.wait(lambda: self._ready() >= workers and bool(self.ask("GET", "/v1/tokenizers")[1].get("tokenizers")))
        return self

    def _ready(self) -> int:
        return sum(each["is_healthy"] for each in self.workers())

    def workers(self) -> list[dict[str, Any]]:
        """What it knows of its workers."""
        found: list[dict[str, Any]] = self.ask("GET", "/workers")[1].get("workers", [])
        return found

    def wait(self, condition: Any) -> None:
        """Until it holds; fails with the end of the gateway's log."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                if condition():
                    return
            except OSError:
                pass
            time.sleep(STEP_SECONDS)
        raise AssertionError(f"not within {PATIENCE:g} s: {self.log()[-3000:]}")

    def log(self) -> str:
        """Everything that it logged."""
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        with self.open(method, path, body) as answer:
            text = answer.read()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, {"text": text.decode(errors="replace")}

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        return self.ask("POST", path, body)

    def events(self, path: str, **body: Any) -> Iterator[Any]:
        """The server-sent events of a streamed POST as JSON, to the end or until the generator is closed."""
        with self.open("POST", path, body | {"stream": True}) as answer:
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def open(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """An answer that is not read yet; leaving it closes the connection."""
        return self.begin(method, path, body).getresponse()

    def begin(self, method: str, path: str, body: Any = None) -> http.client.HTTPConnection:
        """A connection with a request on it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"content-type": "application/json", "connection": "close"})
        return connection

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._log.close()
