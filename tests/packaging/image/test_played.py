"""The rendered worker in the real image: Secret, ConfigMap, user, read-only root, memory limit; it streams and drains.

The tests share one worker and run in the order of the file: the last one drains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from service.client import CallFailed, Chunk, End, SlipstreamClient
from tests.packaging.helm.rules import amount
from tests.packaging.image.conftest import Played
from tests.packaging.image.podman import Podman
from tests.packaging.image.worker import PlayedWorker, unique

pytestmark = pytest.mark.soak

SECRET = unique("tokens")
ALICE, BOB = "a" * 32, "b" * 32
VALUES = {
    "auth": {"existingSecret": SECRET},
    "tenants": {"bob": {"concurrent_requests": 0}},
    "settings": {"native": "auto"},
}
COMPILE_SECONDS = 500.0


@pytest.fixture(scope="module")
def worker(played: Played) -> PlayedWorker:
    return played(VALUES, {SECRET: {"tokens": f"alice:{ALICE}\nbob:{BOB}\n".encode()}}).start()


@pytest.fixture
async def alice(worker: PlayedWorker) -> AsyncIterator[SlipstreamClient]:
    async with SlipstreamClient(worker.target, token=ALICE) as client:
        yield client


async def text_of(client: SlipstreamClient, prompt: str = "27+45=") -> str:
    return "".join([each.text async for each in client.generate(prompt, max_tokens=8) if isinstance(each, Chunk)])


def test_the_container_is_what_the_pod_asks_for(worker: PlayedWorker, podman: Podman) -> None:
    found = podman.inspect("container", worker.container)
    security = worker.spec["securityContext"]
    assert found["Config"]["User"] == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["Memory"] == amount(worker.rendered.server["resources"]["limits"]["memory"])
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "always"
    assert worker.probe("liveness") and worker.probe("readiness")


def test_it_has_no_rights_and_writes_to_its_volumes_only(worker: PlayedWorker) -> None:
    status = dict(line.split(":\t", 1) for line in worker.run("cat", "/proc/1/status").splitlines() if ":\t" in line)
    assert (status["Uid"].split(), status["Gid"].split()) == (["10001"] * 4, ["10001"] * 4)
    assert {status[each] for each in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for path in ("/opt/slipstream/x", "/x", "/usr/x", "/etc/x", "/etc/slipstream/auth/x"):
        assert "Read-only" in worker.run("touch", path)
    assert worker.run("touch", "/cache/x", "/tmp/x", "/dev/shm/x") == ""


async def test_it_streams_to_those_that_its_secret_names(alice: SlipstreamClient, worker: PlayedWorker) -> None:
    assert await text_of(alice) == "72"
    async with SlipstreamClient(worker.target) as unnamed:
        with pytest.raises(CallFailed) as refused:
            await text_of(unnamed)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED


async def test_tenants_have_the_limits_of_its_config_map(worker: PlayedWorker) -> None:
    async with SlipstreamClient(worker.target, token=BOB) as bob:
        with pytest.raises(CallFailed) as refused:
            await text_of(bob)
    assert refused.value.reason == "TENANT_LOCKED_OUT"


def test_the_health_check_of_the_image(worker: PlayedWorker, podman: Podman) -> None:
    told = podman.inspect("image", worker.rendered.server["image"])["Healthcheck"]
    assert told["Test"] == ["CMD", "slipstream", "health"]
    assert worker.run("slipstream", "health", f"--server={worker.target}").strip() == "SERVING"


@pytest.mark.timeout(600)
async def test_the_compiler_in_the_image_makes_the_native_code(alice: SlipstreamClient, worker: PlayedWorker) -> None:
    await asyncio.to_thread(worker.wait_printed, "native code computes from now on", COMPILE_SECONDS)
    assert await text_of(alice) == "72"
    assert ".so" in worker.run("ls", "/cache/native")


async def test_sigterm_ends_the_stream_whole_and_the_process_with_0(
    alice: SlipstreamClient, worker: PlayedWorker
) -> None:
    """As long as the linger, and longer: it is open when the port closes."""
    story = alice.generate("A story:", max_tokens=1500, ignore_eos=True)
    first = await anext(each async for each in story if isinstance(each, Chunk))
    stopped = asyncio.create_task(asyncio.to_thread(worker.stop))
    rest = [each async for each in story]
    tokens = sum(len(each.token_ids) for each in [first, *rest] if isinstance(each, Chunk))
    assert tokens == 1500 and isinstance(rest[-1], End)
    assert await stopped == 0
    assert "drained, 0 streams cut" in worker.output
    assert worker.state["RestartCount"] == 0
