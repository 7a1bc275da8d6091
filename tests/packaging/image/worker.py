"""A Deployment as the chart renders it, played by podman: what a kubelet would start, in the real image.

Of the Deployment nothing is changed but where volumes lie: each is a directory that is made as a kubelet makes it, with
links that are swapped for Secrets and ConfigMaps. Podman keeps one volume of a name for all pods, never renews it, and
4.3 leaves Secrets in base64.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.packaging.helm.chart import Object, Rendered
from tests.packaging.helm.container import Pod
from tests.packaging.image.podman import Podman

START_SECONDS = 180.0
MEMORY = Path("/dev/shm")
"""Where a volume of memory lies: what a container writes there counts against its limit."""

Contents = dict[str, dict[str, bytes]]
"""Contents of Secrets and ConfigMaps, by name and key."""


class PlayedWorker:
    """One worker in a pod. It is not started by its constructor; `close` it, started or not."""

    def __init__(self, podman: Podman, rendered: Rendered, folder: Path, contents: Contents | None = None) -> None:
        self.podman, self.rendered, self.folder = podman, rendered, folder
        self.deployment: Object = rendered.one("Deployment")
        self.spec: Object = self.deployment["spec"]["template"]["spec"]
        self.name = self.deployment["metadata"]["name"]
        self.container = f"{self.name}-pod-0-server"
        told = {each["metadata"]["name"]: each["data"] for each in rendered.all("ConfigMap")}
        configs = {name: {key: text.encode() for key, text in data.items()} for name, data in told.items()}
        self._memory = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=MEMORY))
        self._memory.chmod(0o1777)
        self.volumes = Pod(self.spec, folder, configs | (contents or {}))
        ports = {each["name"]: int(each["containerPort"]) for each in rendered.server["ports"]}
        self.port, self.metrics_port = ports["grpc"], ports["metrics"]

    @property
    def target(self) -> str:
        """Where it serves."""
        return f"127.0.0.1:{self.port}"

    def place(self, volume: str) -> Path:
        """The directory of this machine that a volume is."""
        return self.volumes.places[volume] or self._memory

    def manifest(self) -> Path:
        """The file that podman plays."""
        deployment = copy.deepcopy(self.deployment)
        mounted = [each["name"] for each in self.spec["volumes"]]
        places = [{"name": name, "hostPath": {"path": str(self.place(name))}} for name in mounted]
        deployment["spec"]["template"]["spec"]["volumes"] = places
        file = self.folder / "played.yaml"
        file.write_text(yaml.safe_dump(deployment))
        return file

    def play(self) -> None:
        """Have podman create and start the pod."""
        self.podman.ok("play", "kube", str(self.manifest()))

    def start(self) -> PlayedWorker:
        """Play it, and wait until the startup probe succeeds."""
        self.play()
        self.wait(lambda: self.probe("startup"))
        return self

    def probe(self, name: str) -> bool:
        """Whether a probe, as rendered, succeeds: a kubelet asks from outside, in plain text."""
        told = self.rendered.server[f"{name}Probe"]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{told['port']}") as channel:
            try:
                asked = health_pb2.HealthCheckRequest(service=told["service"])
                answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=self.timeout(name))
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def timeout(self, probe: str) -> float:
        """Seconds that a probe waits, as rendered."""
        return float(self.rendered.server[f"{probe}Probe"]["timeoutSeconds"])

    def wait(self, condition: Any, within: float = START_SECONDS) -> None:
        """Until it holds; fails with what the container printed."""
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end, f"{self.state}\n{self.output}"
            time.sleep(0.1)

    def wait_printed(self, text: str, within: float = START_SECONDS) -> None:
        """Until it has printed this."""
        self.wait(lambda: text in self.output, within)

    @property
    def output(self) -> str:
        """What it printed so far, in all its starts."""
        done = self.podman.run("logs", self.container)
        return done.stdout + done.stderr

    @property
    def state(self) -> dict[str, Any]:
        """Status, exit code and more, as podman has it; RestartCount too."""
        found = self.podman.inspect("container", self.container)
        return dict(found["State"]) | {"RestartCount": found["RestartCount"]}

    def run(self, *command: str) -> str:
        """Standard output and errors of a command inside, as of `kubectl exec`; it may fail."""
        done = self.podman.run("exec", self.container, *command)
        return done.stdout + done.stderr

    def stop(self) -> int:
        """As a kubelet ends it: SIGTERM, and SIGKILL after the grace. The exit code."""
        grace = self.spec["terminationGracePeriodSeconds"]
        self.podman.ok("stop", "--time", str(grace), self.container, within=grace + 30)
        return int(self.state["ExitCode"])

    def remove(self) -> None:
        """Remove the pod, if it is there; its directories stay, as those of a node."""
        self.podman.run("pod", "rm", "--force", "--time", "0", f"{self.name}-pod-0")

    def close(self) -> None:
        """Remove everything of it that is not below `folder`."""
        self.remove()
        shutil.rmtree(self._memory, ignore_errors=True)


def unique(name: str) -> str:
    """A name for objects of this process: podman keeps them for all."""
    return f"{name}-{os.getpid()}"
