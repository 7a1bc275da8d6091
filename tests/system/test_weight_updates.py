"""A server whose weights are changed while clients stream, with and without front ends, and by the hub's names."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.models.bundled import bundled_model_dir
from service.client import CallFailed, Chunk, ControlClient, End, SlipstreamClient
from tests.support.fakes.fake_hub import FakeHub
from tests.support.ports import free_port
from tests.support.until import PATIENCE, until
from tests.system.test_model_by_name import command, environment

STREAMS, TOKENS, UPDATES = 8, 400, 4
SUM = "27+45="


def other_weights(directory: Path) -> None:
    """The bundled model with noise in its weights, which says other things."""
    shutil.copytree(bundled_model_dir(), directory)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(directory / "model.safetensors")
    noisy = {n: w * (1 + 0.5 * torch.randn(w.shape, generator=generator)).to(w.dtype) for n, w in weights.items()}
    save_file(noisy, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    other_weights(root / "noisy")
    shutil.copytree(bundled_model_dir(), root / "good")
    return root


@contextmanager
def served(*arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    own = ("--port", str(port), "--metrics-port", "0", "--drain-linger", "0", "--unnamed-callers", "all")
    with subprocess.Popen(
        command("serve", *own, *arguments), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and "serving" in process.stdout.readline()
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


async def stream(client: SlipstreamClient, number: int, seen: set[int]) -> End:
    """Read one stream to its end; `seen` has its number from its first token on."""
    count, end = 0, None
    async for event in client.generate(f"{SUM} {number}", max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
        if isinstance(event, Chunk):
            seen.add(number)
            assert event.position == count, "none is lost, none comes twice"
            count += len(event.token_ids)
        elif isinstance(event, End):
            end = event
    assert end is not None and count == TOKENS == end.completion_tokens
    return end


async def said(client: SlipstreamClient) -> str:
    return (await client.complete(SUM, temperature=0.0, max_tokens=4))[0].text


@pytest.mark.parametrize("front_ends", [0, 2])
async def test_weights_change_while_clients_stream(root: Path, front_ends: int) -> None:
    """Every stream is whole whatever was changed meanwhile, and what begins behind a change is of the new weights."""
    arguments = ("--model", str(root / "good"), "--weights-dir", str(root), "--frontends", str(front_ends))
    with served(*arguments, "--max-total-tokens", "8192") as (target, process):
        async with SlipstreamClient(target) as client:
            control, good, seen, restarted = ControlClient(client), await said(client), set[int](), 0
            assert good.startswith("72")
            streams = [asyncio.create_task(stream(client, number, seen)) for number in range(STREAMS)]
            await until(lambda: len(seen) == STREAMS)
            for turn in range(UPDATES):
                name = ("noisy", "good")[turn % 2]
                restarted += (await control.update_weights(f"{name}-{turn}", path=name)).restarted_requests
                assert ((await said(client)) == good) == (name == "good")
            with pytest.raises(CallFailed) as refused:
                await control.update_weights("none", path="absent")
            assert refused.value.code.name == "INVALID_ARGUMENT" and str(root) not in refused.value.message
            ends = await asyncio.gather(*streams)
            assert {end.started_version for end in ends} == {"default"} and restarted
            assert any(end.weight_version != "default" for end in ends)
            await control.sleep()
            late = asyncio.create_task(said(client))
            assert (await client.server_info()).weight_version == f"good-{UPDATES - 1}"
            await control.wake()
            assert await late == good
            waits = asyncio.create_task(stream(client, STREAMS, seen))
            await until(lambda: STREAMS in seen)
            await control.pause()
            process.terminate()
            with pytest.raises(CallFailed) as drained:
                await waits
            assert drained.value.code.name == "UNAVAILABLE"
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0


async def test_other_revisions_come_from_the_hub_by_name(root: Path, tmp_path: Path) -> None:
    hub = FakeHub.of("org/name", bundled_model_dir())
    with hub.serving(), served("--model", "org/name", env=environment(hub, tmp_path)) as (target, _):
        async with SlipstreamClient(target) as client:
            control, good = ControlClient(client), await said(client)
            done = await control.update_weights("again", name="org/name@main")
            assert (done.weight_version, done.replaced_version) == ("again", "default")
            assert await said(client) == good
            for name, told in (("org/other", "no such model"), ("../x", "must be ORG/NAME")):
                with pytest.raises(CallFailed, match=told) as refused:
                    await control.update_weights("x", name=name)
                assert refused.value.code.name == "INVALID_ARGUMENT"
            with pytest.raises(CallFailed) as closed:
                await control.update_weights("x", path="good")
            assert closed.value.code.name == "UNIMPLEMENTED"
