"""What operators get wrong: one line says what it was, or the worker serves without what it cannot have."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.packaging.image.conftest import Played
from tests.packaging.image.podman import Podman
from tests.packaging.image.worker import START_SECONDS, unique
from tests.support.ports import free_port
from tests.support.until import eventually

pytestmark = pytest.mark.soak

LEAST = ("--rm", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp:mode=1777")
EXIT_SETTINGS, EXIT_MODEL = 2, 3


def runs(podman: Podman, image: str, *flags: str, serve: tuple[str, ...] = (), within: float = 60) -> tuple[int, str]:
    """Exit code and output of a container that ends by itself."""
    done = podman.run("run", *LEAST, *flags, image, "serve", *serve, within=within)
    return done.returncode, done.stdout + done.stderr


def serves(podman: Podman, image: str, *flags: str) -> str:
    """The output of a server that is ready with these flags of podman, and then drained."""
    name, ports = unique("misused"), (f"--port={free_port()}", f"--metrics-port={free_port()}")
    podman.ok("run", "--detach", f"--name={name}", *LEAST[1:], *flags, image, "serve", "--drain-linger=0", *ports)
    try:
        eventually(lambda: "serving slipstream-bundled" in output(podman, name), within=START_SECONDS)
        podman.ok("stop", "--time=60", name)
        assert podman.inspect("container", name)["State"]["ExitCode"] == 0
        return output(podman, name)
    finally:
        podman.run("rm", "--force", "--time=0", name)


def output(podman: Podman, name: str) -> str:
    done = podman.run("logs", name)
    return done.stdout + done.stderr


def of_slipstream(told: str) -> list[str]:
    """The lines in which the process ends, without what podman says of itself."""
    return [line for line in told.splitlines() if line.startswith("slipstream: ")]


OTHERS = {
    "another user": (("--user=12345:12345",), "Permission denied"),
    "a cache of root": (("--tmpfs=/cache:mode=0700",), "Permission denied"),
    "a cache that is read-only": (("--volume={kept}:/cache:ro",), "Read-only file system"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_without_a_cache_it_serves_and_says_why_it_compiles_nothing(
    podman: Podman, image: str, case: str, tmp_path: Path
) -> None:
    flags, why = OTHERS[case]
    os.chown(tmp_path, 10001, 10001)
    # As the chart names it; PyTorch makes this directory while it is imported.
    named = "--env=TORCHINDUCTOR_CACHE_DIR=/cache/inductor"
    told = serves(podman, image, named, *(each.format(kept=tmp_path) for each in flags))
    assert f"no native code, transformers goes on: the cache in /cache/native cannot be used: {why}" in told
    assert f"TORCHINDUCTOR_CACHE_DIR /cache/inductor cannot be used ({why}): /tmp/slipstream-" in told
    assert "Traceback" not in told


def test_a_secret_that_is_missing_is_named(podman: Podman, image: str) -> None:
    code, told = runs(podman, image, serve=("--auth-token-file=/etc/slipstream/auth/tokens",))
    assert code == EXIT_SETTINGS and "Traceback" not in told
    (line,) = of_slipstream(told)
    assert "/etc/slipstream/auth/tokens" in line and "does not exist" in line


def test_a_pod_without_its_config_map_restarts_with_that_line(played: Played) -> None:
    """A kubelet would not start it; one whose ConfigMap lost its key would."""
    worker = played({"auth": {"existingSecret": "t"}, "tenants": {"a": {}}}, {"t": {"tokens": b"a" * 32 + b"\n"}})
    shutil.rmtree(worker.place("tenants"))
    worker.place("tenants").mkdir()
    worker.play()
    worker.wait(lambda: worker.state["RestartCount"] >= 1)
    assert worker.state["ExitCode"] in (0, EXIT_SETTINGS)
    assert re.search(r"^slipstream: .*/etc/slipstream/tenants/tenants.yaml", worker.output, re.MULTILINE)


def test_a_token_file_that_the_user_may_not_read_is_named(podman: Podman, image: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a" * 32 + "\n")
    os.chmod(tokens, 0o600)
    code, told = runs(podman, image, f"--volume={tokens}:/etc/tokens:ro", serve=("--auth-token-file=/etc/tokens",))
    assert (code, "Traceback" in told) == (EXIT_SETTINGS, False)
    (line,) = of_slipstream(told)
    assert "/etc/tokens" in line and "ermission denied" in line


def test_a_model_by_name_without_the_hub_is_told_how_to_get_it(podman: Podman, image: str) -> None:
    """The image is offline unless it is told otherwise, as the chart does with `model.name`."""
    code, told = runs(podman, image, "--env=HF_HOME=/tmp/hf", serve=("--model=org/name",))
    assert code == EXIT_MODEL and "Traceback" not in told
    (line,) = of_slipstream(told)
    assert line == (
        "slipstream: org/name: HF_HUB_OFFLINE is set, and the cache does not have all of its files; "
        "HF_HUB_OFFLINE=0 lets the server fetch them"
    )


def test_the_chart_lets_a_model_by_name_come_from_the_hub(played: Played) -> None:
    """There is none here: the line names the hub, and no longer that the server is offline."""
    model = {"source": "emptyDir", "name": "org/name"}
    hub = {"name": "HF_ENDPOINT", "value": "http://127.0.0.1:9"}
    worker = played({"model": model, "extraEnv": [hub]})
    worker.play()
    worker.wait_printed("slipstream: org/name: http://127.0.0.1:9 cannot be reached")
    assert "OFFLINE" not in worker.output and "Traceback" not in worker.output


def test_a_worker_whose_volumes_are_of_another_user_serves(played: Played) -> None:
    """As where a cluster's volumes know no fsGroup."""
    worker = played()
    worker.place("cache").chmod(0o555)
    worker.start()
    assert worker.run("slipstream", "generate", f"--server={worker.target}", "27+45=").strip() == "72"
    assert "TORCHINDUCTOR_CACHE_DIR /cache/inductor cannot be used" in worker.output
    assert "Traceback" not in worker.output


def test_a_worker_that_may_not_write_anywhere_ends_with_one_line(played: Played) -> None:
    worker = played()
    for each in ("cache", "tmp", "shm"):
        worker.place(each).chmod(0o555)
    worker.play()
    worker.wait(lambda: worker.state["RestartCount"] >= 1)
    assert "no directory for temporary files can be written: mount one at /tmp" in worker.output
    assert "Traceback" not in worker.output
