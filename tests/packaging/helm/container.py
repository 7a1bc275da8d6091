"""Containers of a rendered pod, run for real: the image's files, the pod's volumes and user, a read-only root."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest

from tests.packaging.helm.chart import Object
from tests.packaging.helm.dockerfile import Stage

RUNTIME = Path(__file__).with_name("runtime.py")
PATIENCE = 60.0
# Not all of /etc, since Secrets are mounted below it.
ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "alternatives", "ssl")
SYSTEM = ("/usr", "/dev", "/sys", *(f"/etc/{name}" for name in ETC if Path("/etc", name).exists()))
PREFIX = "/opt/slipstream"

_counter = itertools.count()


def needs_namespaces() -> None:
    """Skip where this user may not have a root and a network of its own."""
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("a container has a /tmp of its own, which would hide this environment: clone to another place")
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("tini") is None:
        pytest.skip("needs root, util-linux and tini (apt-get install util-linux tini)")
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"may not make namespaces here: {tried.stderr.strip()}")


NAMESPACES = ("--mount", "--pid", "--net", "--fork", "--kill-child")


class Pod:
    """A pod's volumes on this machine. `secrets` are contents by name of the Secret or ConfigMap, and key."""

    def __init__(self, spec: Object, folder: Path, secrets: dict[str, dict[str, bytes]] | None = None) -> None:
        self.spec, self.folder = spec, folder
        self.group = spec["securityContext"]["fsGroup"]
        self.places: dict[str, Path | None] = {}
        for volume in spec["volumes"]:
            place = folder / "volumes" / volume["name"]
            place.mkdir(parents=True)
            self.places[volume["name"]] = place
            if "secret" in volume or "configMap" in volume:
                contents = self._of(secrets, volume)
                wanted = volume.get("secret", {}).get("items") or [{"key": key, "path": key} for key in contents]
                self.write_secret(volume["name"], {each["path"]: contents[each["key"]] for each in wanted})
            elif volume["emptyDir"].get("medium") == "Memory":
                self.places[volume["name"]] = None
            else:
                os.chown(place, 0, self.group)
                place.chmod(0o2777)

    @staticmethod
    def _of(secrets: dict[str, dict[str, bytes]] | None, volume: Object) -> dict[str, bytes]:
        return (secrets or {})[volume["secret"]["secretName"] if "secret" in volume else volume["configMap"]["name"]]

    def write_secret(self, name: str, contents: dict[str, bytes]) -> None:
        """As a kubelet does it: files in a new folder, one link that is swapped, links of the files through it."""
        place = self.places[name]
        assert place is not None
        fresh = place / f"..{next(_counter)}"
        fresh.mkdir()
        for key, content in contents.items():
            file = fresh / key
            file.write_bytes(content)
            os.chown(file, 0, self.group)
            file.chmod(0o440)
            if not (place / key).is_symlink():
                (place / key).symlink_to(f"..data/{key}")
        swapped = place / "..data_tmp"
        swapped.symlink_to(fresh.name)
        swapped.replace(place / "..data")


class Container:
    """One container of a pod. `network` is whose network it joins, `hosts` the names that lead to this machine."""

    def __init__(
        self,
        pod: Pod,
        container: Object,
        image: Stage,
        prefix: Path,
        *,
        network: Container | None = None,
        hosts: tuple[str, ...] = (),
    ) -> None:
        self.name = container["name"]
        number = next(_counter)
        folder = pod.folder / f"{self.name}-{number}"
        (folder / "root").mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(hosts)}\n")
        security = pod.spec["securityContext"] | container["securityContext"]
        own = {each["name"]: each.get("value", "") for each in container.get("env", ())}
        entry = container.get("command") or image.command("ENTRYPOINT")
        mounts = [(pod.places[each["name"]], each) for each in container["volumeMounts"]]
        spec = {
            "root": str(folder / "root"),
            "command": [*entry, *container.get("args", () if "command" in container else image.command("CMD"))],
            "env": image.env | own,
            "directory": image.all("WORKDIR")[-1],
            "uid": security["runAsUser"],
            "gid": security["runAsGroup"],
            "groups": [security["fsGroup"]],
            "read_only": security["readOnlyRootFilesystem"],
            "own_network": network is None,
            "binds": [
                *((path, path, False) for path in (*SYSTEM, *_python())),
                (str(prefix), PREFIX, False),
                (str(folder / "hosts"), "/etc/hosts", False),
                *((str(place), each["mountPath"], not each.get("readOnly")) for place, each in mounts if place),
            ],
            "memory": [each["mountPath"] for place, each in mounts if place is None],
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        joined = ("nsenter", f"--net=/proc/{network.pid}/ns/net") if network else ()
        namespaces = [each for each in NAMESPACES if each != "--net" or network is None]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig=KILL",
                    *joined,
                    "unshare",
                    *namespaces,
                    sys.executable,
                    str(RUNTIME),
                    str(folder / "spec.json"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_begun(str(RUNTIME))

    def _wait_begun(self, runtime: str) -> None:
        """Until its process 1 is no longer the program that builds it."""
        end = time.monotonic() + PATIENCE
        while self.running:
            assert time.monotonic() < end, self.output
            with contextlib.suppress(psutil.Error, IndexError):
                if runtime not in psutil.Process(self.pid).cmdline():
                    return
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The container's process 1, as seen from outside."""
        return psutil.Process(self._process.pid).children()[0].pid

    @property
    def tree(self) -> list[psutil.Process]:
        """All its processes."""
        return psutil.Process(self.pid).children(recursive=True)

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait_printed(self, text: str) -> None:
        """Until it has printed this; fails where it ends before."""
        end = time.monotonic() + PATIENCE
        while text not in self.output:
            assert self.running and time.monotonic() < end, f"{text!r} is not in:\n{self.output}"
            time.sleep(0.05)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as `kubectl exec` does."""
        namespaces = ("--mount", "--pid", "--net", "--root", "--wd")
        security = ("--setuid", str(_user(self.pid)), "--setgid", str(_user(self.pid)))
        environment = dict(each.split("=", 1) for each in self._environ())
        return subprocess.run(
            ["nsenter", "--target", str(self.pid), *namespaces, *security, "--", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def _environ(self) -> list[str]:
        return [each for each in Path(f"/proc/{self.pid}/environ").read_text().split("\0") if "=" in each]

    def signal(self, number: int) -> None:
        """Send a signal to its process 1."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        return self._process.wait(seconds)

    def close(self) -> None:
        """End it, and with its process 1 all of its processes. Nothing of a container that was closed is left."""
        if self.running:
            first = psutil.Process(self.pid)
            first.kill()
            self._process.kill()
            psutil.wait_procs([first], timeout=PATIENCE)
        self._process.wait(PATIENCE)


def _user(pid: int) -> int:
    return psutil.Process(pid).uids().effective


def _python() -> list[str]:
    """Where this interpreter and its packages are; in an image they are below /usr and /opt."""
    found = {sys.base_prefix, sysconfig.get_paths()["purelib"]}
    return [path for path in sorted(found) if not path.startswith("/usr/")]
