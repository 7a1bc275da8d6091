"""What cannot start says so in one line, with an exit code, before anything heavy is loaded; what can, drains."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.errors import ModelLoadError, StartupError
from service.checkpoints.files import check_model
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.server.server import Server
from service.server.startup_checks import check_ports
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard
from tests.support.servers import loaded
from tests.support.until import PATIENCE

NO_ADAPTER = "adapter 'x' from /nonexistent: it has no adapter_config.json, so it is no PEFT adapter"


def slipstream(*args: str, **env: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the command line; its result and how long it took."""
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "service", *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, time.monotonic() - before


@pytest.fixture
def taken() -> socket.socket:
    """A listening socket on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.alone
@pytest.mark.parametrize("which", ["port", "metrics-port"])
def test_a_taken_port_is_one_line_and_exit_code_two_within_a_second(
    taken: socket.socket, checkpoint: Path, which: str, scorecard: Scorecard
) -> None:
    number = taken.getsockname()[1]
    # The best of three: the figure is the program's, not the machine's other work.
    runs = [slipstream("serve", "--model", str(checkpoint), "--port", "0", f"--{which}", str(number)) for _ in range(3)]
    done, seconds = runs[0][0], min(each for _, each in runs)
    scorecard(22, f"{which} taken: exit code", done.returncode, equals=2)
    assert re.fullmatch(
        rf"slipstream: cannot listen on 127\.0\.0\.1:{number} \(.*\): address already in use\n", done.stderr
    )
    scorecard(22, f"{which} taken: seconds to the exit", seconds, at_most=1)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("--model", "/nonexistent"), 3, "model directory /nonexistent does not exist"),
        (("--config", "/nonexistent.yaml"), 2, "/nonexistent.yaml: cannot be read: No such file or directory"),
        (("--adapter", "x=/nonexistent"), 3, NO_ADAPTER),
        (("--lora-dir", "/nonexistent"), 3, "lora_dir /nonexistent is no directory"),
        (("--page-size", "0"), 2, "--page-size: must be at least 1; got 0"),
        (("--port", "70000"), 2, "port and metrics_port must be at most 65535"),
    ],
)
def test_what_cannot_work_is_one_line(args: tuple[str, ...], code: int, told: str, scorecard: Scorecard) -> None:
    done, seconds = slipstream("serve", "--port", "0", "--metrics-port", "0", *args)
    assert done.stderr == f"slipstream: {told}\n"
    scorecard(22, f"{args[0]}: exit code", done.returncode, equals=code)
    scorecard(22, f"{args[0]}: seconds to the exit", seconds, at_most=2)


def test_a_bad_variable_is_named() -> None:
    done, _ = slipstream("serve", SLIPSTREAM_MAX_RUNNING_REQUESTS="many")
    assert (done.returncode, done.stderr) == (
        2,
        "slipstream: SLIPSTREAM_MAX_RUNNING_REQUESTS: 'many' is not a whole number\n",
    )


def spoil_remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def spoil_extend(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")


def spoil_header_length(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")


def spoil_header_text(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


def spoil_empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def spoil_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_remove_config, "has no config.json"),
        (spoil_no_weights, "has no *.safetensors files"),
        (spoil_truncate, "is truncated"),
        (spoil_extend, "is longer than its header says"),
        (spoil_header_length, "its header is longer than the file"),
        (spoil_header_text, "its header cannot be read"),
        (spoil_empty_file, "its header cannot be read"),
        (spoil_missing_shard, "lacks model-00002.safetensors"),
    ],
)
def test_unusable_checkpoints_are_refused_by_name(
    checkpoint: Path, spoil: Callable[[Path], None], told: str, scorecard: Scorecard
) -> None:
    check_model(checkpoint)
    spoil(checkpoint)
    with pytest.raises(ModelLoadError) as refused:
        check_model(checkpoint)
    assert told in refused.value.message and str(checkpoint) in refused.value.message
    assert "\n" not in refused.value.message
    scorecard(22, f"{told}: exit code", refused.value.exit_code, equals=3)


async def test_a_second_server_on_the_port_is_refused_and_the_first_goes_on(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loaded(Server(config(), lambda *_: FakeEngine())) as first:
        second = config(port=first.port)
        with pytest.raises(StartupError, match="in use"):
            check_ports(second)
        with pytest.raises(StartupError):
            await Server(second, lambda *_: FakeEngine()).listen()
        # Even if both had looked at the same moment, only one may get it.
        monkeypatch.setattr("service.server.server.check", lambda config: None)
        with pytest.raises(StartupError, match="gRPC"):
            await Server(second, lambda *_: FakeEngine()).listen()
        async with SlipstreamClient(f"127.0.0.1:{first.port}") as client:
            assert len(await client.complete("hi")) == 1


@asynccontextmanager
async def serving_process(checkpoint: Path, *args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`slipstream serve` as a process, with a scripted engine; the process and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fakes.serve_fake", "serve"),
        *("--model", str(checkpoint), "--port", "0", "--metrics-port", "0", "--drain-linger", "0", *args),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        found = re.fullmatch(
            r"slipstream: serving fake on (\S+:\d+), metrics on http://\S+/metrics \(Ctrl-C drains\)\n", line
        )
        assert found, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("flag", ["--config", "--tenants-file"])
def test_a_file_with_no_date_is_one_line_and_exit_code_two(flag: str, checkpoint: Path, tmp_path: Path) -> None:
    given, tokens = tmp_path / "given.yaml", tmp_path / "tokens"
    given.write_text("until: 2026-02-30")
    tokens.write_text("alice:0123456789abcdef")
    ports = ("--port", "0", "--metrics-port", "0", "--auth-token-file", str(tokens))
    done, _ = slipstream("serve", "--model", str(checkpoint), *ports, flag, str(given))
    told = f"slipstream: {given}: not valid YAML: day is out of range for month\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_process_drains_and_exits_with_zero(checkpoint: Path, number: signal.Signals) -> None:
    async with serving_process(checkpoint, "--drain-grace", "0.2") as (process, address):
        async with SlipstreamClient(address) as client:
            assert len((await client.complete("hi"))[0].token_ids) == 8
            held = client.generate("hold")
            await anext(held)
            process.send_signal(number)
            with pytest.raises(CallFailed) as cut:
                await anext(held)
        assert (cut.value.reason, cut.value.tokens_emitted) == ("DRAINING", 1)
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0


async def test_a_process_whose_engine_dies_exits_with_one(checkpoint: Path) -> None:
    async with serving_process(checkpoint) as (process, address):
        async with SlipstreamClient(address) as client:
            with pytest.raises(CallFailed) as failed:
                await client.complete("die")
        assert failed.value.reason == "ENGINE_DEAD"
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 1
