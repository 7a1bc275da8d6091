"""The rendered worker on the CPU, started for real: command, environment, user, rights, volumes and read-only root.

What a cluster adds, scheduling, kubelet and Services, is not here; names of Services lead to this machine.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.models.native.extension import DECODER
from core.native.kept_library import digest_path
from tests.packaging.helm.chart import NAMESPACE, RELEASE, Helm4, Rendered
from tests.packaging.helm.container import Container, Pod, needs_namespaces
from tests.packaging.helm.dockerfile import Stage
from tests.packaging.helm.image import install
from tests.packaging.helm.matrix import CPU, SECURE
from tests.packaging.helm.rules import amount
from tests.security.certificates import Authority, Pair, needs_openssl

pytestmark = pytest.mark.tools

SERVICES = tuple(f"{RELEASE}-slipstream{suffix}.{NAMESPACE}.svc" for suffix in ("", "-pods"))
START_SECONDS = 120.0

FETCH = """
import os, shutil
from core.models.bundled import bundled_model_dir
shutil.copytree(bundled_model_dir(), os.environ["MODEL_DIR"])
"""
FETCHED = {"source": "emptyDir", "path": "m", "init": {"enabled": True, "command": ["python", "-c", FETCH]}}


@pytest.fixture(scope="session")
def namespaces() -> None:
    needs_namespaces()


@pytest.fixture(scope="session")
def prefix(namespaces: None, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies at /opt/slipstream in the image."""
    return install(wheel, tmp_path_factory.mktemp("image"))


def keep_cache(pod: Pod) -> None:
    """Fill /cache as an earlier pod left it: servers of tests should not compile beside being tested."""
    cache = pod.places["cache"]
    if cache is not None and DECODER.is_built():
        (cache / "native").mkdir(mode=0o755)
        for kept in (DECODER.path(), digest_path(DECODER.path())):
            shutil.copy(kept, cache / "native")


class Worker:
    """A pod of the Deployment whose server runs."""

    def __init__(self, rendered: Rendered, image: Stage, prefix: Path, folder: Path, secrets: Any = None) -> None:
        self.rendered, self.image, self.prefix, self.folder, self.secrets = rendered, image, prefix, folder, secrets
        self.pod = Pod(rendered.pod, folder / "worker", secrets)
        keep_cache(self.pod)
        for each in rendered.pod.get("initContainers", ()):
            ran = Container(self.pod, each, image, prefix)
            assert ran.wait() == 0, ran.output
        self.server = Container(self.pod, rendered.server, image, prefix)

    def probe(self, name: str) -> bool:
        """Whether a probe, as rendered, succeeds: in plain text, by port and service."""
        told = self.rendered.server[f"{name}Probe"]["grpc"]
        live = () if told["service"] else ("--live",)
        return self.server.run("slipstream", "health", f"--server=127.0.0.1:{told['port']}", *live).returncode == 0

    def wait_started(self) -> None:
        """Until the startup probe succeeds."""
        end = time.monotonic() + START_SECONDS
        while not self.probe("startup"):
            assert self.server.running and time.monotonic() < end, self.server.output
            time.sleep(0.2)

    def helm_test(self, name: str, hosts: tuple[str, ...] = SERVICES) -> Container:
        """One container of the pod of `helm test`, ended."""
        pod = self.rendered.test_pod["spec"]
        (wanted,) = [each for each in pod["containers"] if each["name"] == name]
        folder = self.folder / f"test-{time.monotonic_ns()}"
        ran = Container(
            Pod(pod, folder, self.secrets), wanted, self.image, self.prefix, network=self.server, hosts=hosts
        )
        ran.wait()
        return ran


@pytest.fixture(scope="module")
def worker(helm4: Helm4, image: Stage, prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    started = Worker(helm4.render(CPU | {"metrics": {"enabled": True}}), image, prefix, tmp_path_factory.mktemp("cpu"))
    try:
        started.wait_started()
        yield started
    finally:
        started.server.close()


def test_it_starts_alive_and_ready(worker: Worker) -> None:
    assert worker.probe("liveness") and worker.probe("readiness")
    worker.server.wait_printed("serving slipstream-bundled on 0.0.0.0:50051")
    if DECODER.is_built():
        assert "compiling" not in worker.server.output, "what a kept cache holds was not taken"


def test_the_health_check_of_the_image(worker: Worker, image: Stage) -> None:
    assert worker.server.run(*image.healthcheck).stdout.strip() == "SERVING"


def test_helm_test_succeeds(worker: Worker) -> None:
    for name in ("generate", "metrics"):
        ran = worker.helm_test(name)
        assert ran.wait() == 0, ran.output
    assert worker.helm_test("generate").output.strip() == "72"


def test_helm_test_fails_where_nothing_answers(worker: Worker) -> None:
    assert worker.helm_test("metrics", hosts=()).wait() != 0
    ran = worker.helm_test("generate", hosts=())
    assert ran.wait() != 0 and "check the name" in ran.output


def test_it_writes_to_its_volumes_only_and_has_no_rights(worker: Worker) -> None:
    for path in ("/opt/slipstream/x", "/x", "/usr/x", "/etc/x"):
        assert "Read-only" in worker.server.run("touch", path).stderr
    for path in ("/cache/x", "/tmp/x", "/dev/shm/x"):
        assert worker.server.run("touch", path).returncode == 0
    status = worker.server.run("cat", "/proc/1/status").stdout.split("\n")
    told = dict(each.split(":\t", 1) for each in status if ":\t" in each)
    assert (told["Uid"].split(), told["Gid"].split()) == (["10001"] * 4, ["10001"] * 4)
    assert {told[each] for each in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16} and told["NoNewPrivs"] == "1"


def test_requests_of_memory_are_enough(worker: Worker) -> None:
    worker.helm_test("generate")
    used = sum(each.memory_info().rss for each in worker.server.tree)
    asked = worker.rendered.server["resources"]["requests"]["memory"]
    assert used < amount(asked), f"{used >> 20} MiB, requests {asked}"


def test_sigterm_drains_within_the_grace(worker: Worker) -> None:
    """Last of those that share the worker."""
    worker.server.signal(signal.SIGTERM)
    assert worker.server.wait(worker.rendered.pod["terminationGracePeriodSeconds"]) == 0
    assert "drained" in worker.server.output


@pytest.mark.soak
def test_the_commands_of_the_image_alone(helm4: Helm4, image: Stage, prefix: Path, tmp_path: Path) -> None:
    """`docker run` without arguments; process 1 passes on a signal that comes before anybody handles signals."""
    rendered = helm4.render(CPU | {"metrics": {"enabled": True}})
    bare = {key: value for key, value in rendered.server.items() if key not in ("args", "env")}
    pod = Pod(rendered.pod, tmp_path)
    keep_cache(pod)
    server = Container(pod, bare, image, prefix)
    try:
        end = time.monotonic() + START_SECONDS
        while not server.tree:
            assert server.running and time.monotonic() < end, server.output
        server.signal(signal.SIGTERM)
        assert server.wait() in (0, 128 + signal.SIGTERM)
    finally:
        server.close()
    server, end = Container(pod, bare, image, prefix), time.monotonic() + START_SECONDS
    try:
        while server.run(*image.healthcheck).returncode != 0:
            assert server.running and time.monotonic() < end, server.output
            time.sleep(0.2)
        server.wait_printed("serving slipstream-bundled on 0.0.0.0:50051")
    finally:
        server.close()


def pem(pair: Pair, authority: Authority) -> dict[str, bytes]:
    found = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.cert}
    return {name: path.read_bytes() for name, path in found.items()}


@needs_openssl
@pytest.mark.soak
def test_fetched_weights_and_renewed_secrets(helm4: Helm4, image: Stage, prefix: Path, tmp_path: Path) -> None:
    """An init container fills the volume; mutual TLS and tokens; plain probes; a swapped Secret counts at once."""
    authority, next_authority = Authority(tmp_path, "ca"), Authority(tmp_path, "next")
    server, client, renewed = (
        issuer.issue(name, names=SERVICES)
        for issuer, name in ((authority, "server"), (authority, "client"), (next_authority, "server"))
    )
    secrets = {
        "cert": pem(server, authority),
        "clients": {"ca.crt": authority.cert.read_bytes()},
        "client": pem(client, authority),
        "tokens": {"tokens": b"ops:" + b"a" * 32 + b"\n"},
    }
    worker = Worker(helm4.render(CPU | SECURE | {"model": FETCHED}), image, prefix, tmp_path, secrets)
    try:
        worker.wait_started()
        assert worker.probe("liveness") and worker.probe("readiness")
        worker.server.wait_printed("serving m on")
        assert "Read-only" in worker.server.run("touch", "/models/m/x").stderr
        assert worker.helm_test("generate").output.strip() == "72"
        assert worker.server.run("slipstream", "health").returncode != 0, "plain text on the port with TLS"
        worker.secrets = secrets | {"tokens": {"tokens": b"ops:" + b"b" * 32 + b"\n"}}
        assert "UNAUTHENTICATED" in worker.helm_test("generate").output
        worker.pod.write_secret("auth", worker.secrets["tokens"])
        assert worker.helm_test("generate").output.strip() == "72"
        worker.pod.write_secret("tls", pem(renewed, next_authority))
        refused = worker.helm_test("generate").output
        assert "do not accept each other's certificates" in refused, "the old authority signed nothing here"
        worker.secrets = worker.secrets | {"cert": pem(renewed, next_authority)}
        assert worker.helm_test("generate").output.strip() == "72"
        assert worker.server.running
    finally:
        worker.server.close()
