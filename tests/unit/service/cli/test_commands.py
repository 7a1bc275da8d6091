"""What the commands do with their options and what they say, where no other file of tests has it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli.cli import cli
from service.cli.commands.serve import ready_line
from service.config.server_config import ServerConfig
from tests.support.fakes.fake_engine import FakeEngine

TRACE = {
    "steps": 12,
    "device_seconds": 1.25,
    "scheduler_seconds": 0.004,
    "scheduler_seconds_beside_device": 0.003,
}


class Door(BaseHTTPRequestHandler):
    """Answers each request for a trace with `TRACE`; remembers what was asked."""

    asked: list[str] = []

    def do_POST(self) -> None:
        Door.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"otherData": TRACE}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def metrics() -> Iterator[str]:
    Door.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("ending", ["", "/", "/metrics"])
def test_trace_asks_for_its_seconds_and_tells_what_ran_beside_the_device(
    metrics: str, ending: str, tmp_path: Path
) -> None:
    out = tmp_path / "t.json"
    done = CliRunner().invoke(cli, ["trace", "--seconds", "0.5", "--metrics", metrics + ending, "--out", str(out)])
    assert (done.exit_code, Door.asked) == (0, ["/trace?seconds=0.5"])
    assert json.loads(out.read_text()) == {"otherData": TRACE}
    assert done.output == f"{out}: 12 steps, device at work 1.25 s, 75% of the scheduler's 4.0 ms beside it\n"


def test_options_that_are_zero_are_given_all_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero is greedy, off, or a seed like any other; the model's own default is another."""
    engine = FakeEngine()
    monkeypatch.setattr("service.engine.builder.build_core_engine", lambda *_: engine)
    assert engine.model_info.default_sampling.temperature != 0.0
    asked = ["generate", "--model", str(checkpoint), "--temperature", "0", "--top-k", "0", "--seed", "0", "hi"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    sampling = engine.streams[0].request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 0, 0)


@pytest.mark.parametrize("asked", [[], ["--no-speculative"]])
def test_speculation_is_switched_off_for_a_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr("service.engine.builder.build_core_engine", lambda *_: engine)
    done = CliRunner().invoke(cli, ["generate", "--model", str(checkpoint), *asked, "hi"])
    assert done.exit_code == 0, done.output
    assert engine.streams[0].request.speculative is not asked


def test_the_ready_line_tells_the_ports_that_were_bound() -> None:
    config = ServerConfig.of(host="10.0.0.1", port=0, metrics_port=0)
    server: Any = SimpleNamespace(config=config, engine=FakeEngine(), port=5001, metrics_port=9001)
    assert ready_line(server) == (
        "slipstream: serving fake on 10.0.0.1:5001, metrics on http://127.0.0.1:9001/metrics (Ctrl-C drains)"
    )


@pytest.mark.parametrize(
    "command",
    [("generate", "x", "--wait"), ("adapters", "list", "--wait"), ("health", "--timeout"), ("trace", "--seconds")],
    ids=" ".join,
)
@pytest.mark.parametrize("seconds", ["nan", "-1"])
def test_seconds_are_a_number_and_not_negative(command: tuple[str, ...], seconds: str) -> None:
    done = CliRunner().invoke(cli, [*command, seconds])
    assert done.exit_code == 2 and f"Invalid value for '{command[-1]}'" in done.output, done.output
