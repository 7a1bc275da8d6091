"""`slipstream serve --model ORG/NAME`: it answers while the files come, serves by that name, and says why it cannot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from core.models.bundled import bundled_model_dir
from service.client import SyncSlipstreamClient
from tests.support.fakes.fake_hub import COMMIT, FakeHub
from tests.support.ports import free_port
from tests.support.until import PATIENCE, until

FREE = ("--port", "0", "--metrics-port", "0")


def environment(hub: FakeHub, cache: Path) -> dict[str, str]:
    others = ("HF_", "HUGGING", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "service", *arguments]


def test_it_says_that_it_is_starting_while_the_files_come(tmp_path: Path) -> None:
    hub = FakeHub.of("org/name", bundled_model_dir())
    hub.held = threading.Event()
    port = free_port()
    arguments = ("--model", "org/name", "--port", str(port), "--metrics-port", "0", "--drain-linger", "0")
    with hub.serving():
        with subprocess.Popen(
            command("serve", *arguments, "--native", "off"),
            env=environment(hub, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                with SyncSlipstreamClient(f"127.0.0.1:{port}") as client:
                    asyncio.run(until(lambda: len(hub.fetched()) > 1, within=PATIENCE))
                    assert client.is_loading(timeout=PATIENCE)
                    hub.held.set()
                    assert process.stdout is not None
                    ready = process.stdout.readline()
                    assert ready.startswith(f"slipstream: serving org/name on 127.0.0.1:{port}, ")
                    assert client.model_info().name == "org/name"
                    assert client.complete("27+45=", temperature=0.0)[0].text.startswith("72")
                process.terminate()
                _, errors = process.communicate(timeout=PATIENCE)
            finally:
                hub.held.set()
                process.kill()
    assert process.returncode == 0 and "downloading org/name (" in errors
    assert (tmp_path / "models--org--name" / "snapshots" / COMMIT / "config.json").is_file()


@pytest.mark.parametrize("subcommand", [("serve", *FREE, "--log-level", "error"), ("generate", "hi")])
def test_a_name_that_no_hub_has_is_one_line(tmp_path: Path, subcommand: tuple[str, ...]) -> None:
    with FakeHub("org/name", {}).serving() as hub:
        done = subprocess.run(
            command(*subcommand, "--model", "org/other"),
            env=environment(hub, tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
        )
    advice = "(a private one needs HF_TOKEN)"
    told = f"slipstream: org/other: no directory of that name is here, and no such model on {hub.endpoint} {advice}\n"
    assert (done.returncode, done.stderr) == (3, told)
