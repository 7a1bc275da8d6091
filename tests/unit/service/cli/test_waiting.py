"""Commands of the real command line against a real server process that takes its time to load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.checkpoints import make_checkpoint
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.within import within

START_SECONDS = 150.0
END_SECONDS = 30.0
COMMANDS = {
    ("generate", "hello", "--max-tokens", "3"): "0 1 2 \n",
    ("embed", "hello", "--no-normalize", "--dimensions", "2"): "[5.0, 0.0]\n",
    ("classify", "hello", "--raw-scores"): "relevance  5.0000\n",
    ("score", "hell", "o", "--raw-scores"): "1  5.0000  o\n",
    ("adapters", "list"): "name",
}
"""What each prints, once the server is there."""


@dataclass
class Loading:
    """A server that listens and loads until `load` is called."""

    target: str
    gate: Path
    process: asyncio.subprocess.Process

    def load(self) -> None:
        """Have the model there."""
        self.gate.write_bytes(b"go")

    def told(self, seconds: float) -> str:
        """What a command says while it waits."""
        return f"slipstream: the server at {self.target} is loading its model; waiting at most {seconds:g} s\n"


@asynccontextmanager
async def loading(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Loading]:
    """Such a server, whose port is open."""
    gate, target = tmp_path / "gate", f"127.0.0.1:{free_port()}"
    os.mkfifo(gate)
    ports = ("--port", target.rpartition(":")[2], "--metrics-port", "0", "--drain-linger", "0")
    process = await started(
        "tests.support.fakes.serve_slowly",
        str(gate),
        "serve",
        "--model",
        str(checkpoint),
        *ports,
        "--lora-dir",
        str(tmp_path),
    )
    try:
        async with asyncio.timeout(START_SECONDS), SlipstreamClient(target) as client:
            while not await is_loading(client):
                assert process.returncode is None
        yield Loading(target, gate, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def is_loading(client: SlipstreamClient) -> bool:
    try:
        return bool((await client.server_info()).state == pb.SERVER_STATE_STARTING)
    except CallFailed:
        await client.channel.channel_ready()
        return False


async def started(module: str, *args: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *args), cwd=ROOT, stdout=pipe, stderr=pipe
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    """Exit status, standard output and what is left of standard error."""
    async with asyncio.timeout(START_SECONDS):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        return (await process.stderr.readline()).decode()


async def test_commands_wait_for_a_server_that_loads_and_say_so(tmp_path: Path, checkpoint: Path) -> None:
    async with loading(tmp_path, checkpoint) as server:
        commands = [await started("service", *args, "--server", server.target) for args in COMMANDS]
        # Every one has met the server before it is ready: the line is told then, and names the default.
        assert [await line(each) for each in commands] == [server.told(300)] * len(commands)
        server.load()
        for process, output in zip(commands, COMMANDS.values(), strict=True):
            code, out, err = await ended(process)
            assert (code, err) == (0, "") and out.startswith(output)


async def test_waiting_ends_with_advice_and_a_status(tmp_path: Path, checkpoint: Path) -> None:
    async with loading(tmp_path, checkpoint) as server:
        code, out, err = await ended(
            await started("service", "generate", "hello", "--server", server.target, "--wait", "0.5")
        )
        assert (code, out) == (1, "")
        advice = f"Error: the server at {server.target} is still loading after 0.5 s; wait longer with --wait SECONDS\n"
        assert err == server.told(0.5) + advice


async def test_a_server_that_fails_to_load_is_not_waited_for_to_the_end(tmp_path: Path, checkpoint: Path) -> None:
    async with loading(tmp_path, checkpoint) as server:
        waiting = await started("service", "generate", "hello", "--server", server.target)
        assert await line(waiting) == server.told(300)
        server.process.kill()
        code, out, err = await ended(waiting)
        assert (code, out) == (1, "")
        assert err.startswith(f"Error: the server at {server.target} went away while it was loading; its log says why")


async def test_a_server_that_freezes_while_it_loads_is_waited_for_as_long_as_was_asked(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with loading(tmp_path, checkpoint) as server:
        waiting = await started("service", "generate", "hello", "--server", server.target, "--wait", "2")
        try:
            assert await line(waiting) == server.told(2)
            server.process.send_signal(signal.SIGSTOP)
            async with within(END_SECONDS, "the command ends"):
                out, err = await waiting.communicate()
            assert (waiting.returncode, out) == (1, b"")
            assert err.decode().startswith(f"Error: the server at {server.target} ") and b" 2 s" in err
        finally:
            if waiting.returncode is None:
                waiting.kill()
                await waiting.wait()


async def test_a_server_that_is_not_there_is_not_waited_for() -> None:
    target = f"127.0.0.1:{free_port()}"
    code, out, err = await ended(await started("service", "generate", "hello", "--server", target))
    assert (code, out) == (1, "") and "loading" not in err
    assert err.startswith(f"Error: no server answers at {target}; start one with: slipstream serve")


async def test_an_engine_of_its_own_shows_its_progress_and_no_warnings_of_libraries(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="it is what warns")
    made = make_checkpoint("llama", tmp_path)
    code, out, err = await ended(await started("service", "generate", "--model", str(made), "--max-tokens", "2", "a"))
    assert code == 0 and out.endswith("\n")
    assert re.fullmatch(r"([a-z-]+ \.\.\.\n)+", err), "the stages of loading, and nothing else"
