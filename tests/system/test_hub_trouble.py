"""A server whose hub is slow, refuses or is gone: what its terminal shows, how it ends, and which weights it takes."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from core.models.bundled import bundled_model_dir
from service.client import CallFailed, ControlClient, SlipstreamClient
from tests.support.fakes.fake_hub import COMMIT, FakeHub
from tests.support.until import PATIENCE, eventually
from tests.system.test_model_by_name import FREE, command, environment
from tests.system.test_weight_updates import served


def failing(hub: FakeHub, cache: Path, model: str = "org/name", **variables: str) -> list[str]:
    """What `serve` writes at the default log level before it ends with exit code 3."""
    with hub.serving():
        done = subprocess.run(
            command("serve", *FREE, "--model", model),
            env=environment(hub, cache) | variables,
            capture_output=True,
            text=True,
            timeout=6 * PATIENCE,
        )
    assert (done.returncode, done.stdout) == (3, "")
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "no such model on"),
        (401, "refused the token (status 401)"),
        (403, "refused the token (status 403)"),
        (429, "answered with status 429"),
        (500, "answered with status 500"),
    ],
)
def test_a_refusal_is_one_line(tmp_path: Path, status: int | None, said: str) -> None:
    hub = FakeHub.of("org/name", bundled_model_dir())
    hub.status = status
    (line,) = failing(hub, tmp_path, "org/nope" if status is None else "org/name")
    assert line.startswith("slipstream: org/n") and said in line


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE is set"),
        ({"HF_HUB_CACHE": __file__}, "cannot be written"),
        ({"HF_HUB_CACHE": "/proc/none"}, " that stay free, and /proc has 0 bytes free"),
    ],
    ids=["no network", "offline", "offline by the older name", "the cache is a file", "no cache can be made"],
)
def test_what_does_not_work_here_is_one_line(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    (line,) = failing(FakeHub.of("org/name", bundled_model_dir()), tmp_path, **variables)
    assert line.startswith("slipstream: org/name") and said in line


@pytest.mark.parametrize("held", [True, False], ids=["no byte comes", "bytes come slowly"])
def test_sigterm_ends_a_download_at_once(tmp_path: Path, held: bool) -> None:
    hub = FakeHub.of("org/name", bundled_model_dir())
    hub.held, hub.pace = threading.Event(), 0.05
    if not held:
        hub.held.set()
    arguments = ("--model", "org/name", *FREE, "--drain-linger", "0")
    with (
        hub.serving(),
        subprocess.Popen(
            command("serve", *arguments), env=environment(hub, tmp_path), stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            eventually(lambda: "model.safetensors" in hub.fetched())
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            hub.held.set()
            process.kill()
    # After five seconds the guard of the exit would have ended it, with an error.
    assert (process.returncode, "ERROR" in errors) == (0, False), errors


async def test_other_weights_by_a_branch_need_the_hub(tmp_path: Path) -> None:
    hub = FakeHub.of("org/name", bundled_model_dir())
    with hub.serving(), served("--model", "org/name", env=environment(hub, tmp_path)) as (target, _):
        hub.status = 503
        async with SlipstreamClient(target) as client:
            control = ControlClient(client)
            with pytest.raises(CallFailed, match=r"status 503, and what the cache has of it may be old") as refused:
                await control.update_weights("new", name="org/name@main")
            assert refused.value.code.name == "INVALID_ARGUMENT"
            assert (await client.server_info()).weight_version == "default"
            await control.update_weights("new", name=f"org/name@{COMMIT}")
            assert (await client.server_info()).weight_version == "new"


async def test_engines_take_the_commit_that_came(tmp_path: Path) -> None:
    """Each asks by itself, and one that starts again later asks again: the hub may be gone by then."""
    hub = FakeHub.of("org/name", bundled_model_dir())
    arguments = ("--model", "org/name", "--data-parallel", "2")
    with hub.serving(), served(*arguments, env=environment(hub, tmp_path)) as (target, _):
        async with SlipstreamClient(target) as client:
            hub.asked.clear()
            await ControlClient(client).update_weights("new", name="org/name@main")
            branches = [path for _, path, _ in hub.asked if "/revision/main" in path]
            assert 0 < len(branches) <= 2, "one fetch asks for files and their sizes; it was not done again by each"
