"""The image that `make image` built, run by podman; without `--built-image` its tests say that they did not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from helm.image import image_name
from tests.packaging.helm.chart import Helm4, copied, merged
from tests.packaging.helm.matrix import CPU
from tests.packaging.image.podman import Podman, needs_podman
from tests.packaging.image.worker import Contents, PlayedWorker, unique
from tests.support.ports import free_port

Played = Callable[..., PlayedWorker]


@pytest.fixture(scope="session")
def image(pytestconfig: pytest.Config) -> str:
    """Its name, which is what the chart asks for."""
    if not pytestconfig.getoption("built_image"):
        pytest.skip("runs the image that was built: make image")
    return image_name("cpu")


@pytest.fixture(scope="session")
def podman(image: str, tmp_path_factory: pytest.TempPathFactory) -> Podman:
    """Podman that has run the image once."""
    podman = Podman(tmp_path_factory.mktemp("podman"))
    needs_podman(podman, image)
    return podman


@pytest.fixture(scope="session")
def helm4(tmp_path_factory: pytest.TempPathFactory) -> Helm4:
    """Renders the chart."""
    return Helm4(copied(tmp_path_factory.mktemp("chart")))


@pytest.fixture(scope="module")
def played(podman: Podman, helm4: Helm4, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """`played(values, contents)`: a worker on the CPU with these values over `values-cpu.yaml`, not started."""
    numbers = count()
    with ExitStack() as held:

        def make(values: dict[str, Any] | None = None, contents: Contents | None = None) -> PlayedWorker:
            number = next(numbers)
            ports = {name: free_port() for name in ("grpc", "metrics", "health")}
            ours = {"ports": ports, "metrics": {"enabled": True}}
            # What is compiled is the business of one test; the others would wait for the compiler.
            quick = {"fullnameOverride": unique(f"w{number}"), "settings": {"native": "off"}}
            rendered = helm4.render(merged(CPU, ours, quick, values or {}))
            folder = tmp_path_factory.mktemp(f"worker{number}")
            worker = PlayedWorker(podman, rendered, folder, contents)
            held.callback(worker.close)
            return worker

        yield make
