"""Builds the image with docker, podman or buildah, and tells what its layers weigh.

    python -m helm.image --variant cpu --build-arg REGISTRY=registry.example/library

Arguments that are not its own go to the builder: build arguments, secrets, caches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from helm.layers import Layer, read_layers

ROOT = Path(__file__).resolve().parents[1]
NO_BUILDER = "make image needs docker, podman or buildah; on Debian: apt-get install podman runc (or buildah)"
WIDTH = 100
"""Characters of an instruction that are shown."""


class CannotBuild(Exception):
    """No image was built; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds from a Dockerfile; `{image}` stands for the image's name."""

    name: str
    usable: tuple[str, ...]
    """Arguments with which it succeeds where it can build: a client of docker may have no engine."""
    build: tuple[str, ...]
    save: tuple[str, ...]
    """Writes the image to standard output, as `docker save` does."""


# The format of OCI has no place for HEALTHCHECK.
_KEEPS_HEALTHCHECK = ("build", "--layers", "--format=docker", "--tag={image}")
BUILDERS = (
    Builder("docker", ("version",), ("build", "--tag={image}"), ("save", "{image}")),
    Builder("podman", ("info",), _KEEPS_HEALTHCHECK, ("save", "--quiet", "--format=docker-archive", "{image}")),
    Builder("buildah", ("info",), _KEEPS_HEALTHCHECK, ("push", "--quiet", "{image}", "docker-archive:/dev/stdout")),
)


def image_name(variant: str) -> str:
    """Name and tag that the chart asks for by default, with `variant` cpu or cuda."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return f"slipstream:{version}-{variant}"


def find_builder() -> Builder:
    """The first builder that is installed and can build. Raises CannotBuild."""
    reasons = []
    for each in BUILDERS:
        if shutil.which(each.name) is None:
            continue
        asked = subprocess.run([each.name, *each.usable], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return each
        reasons.append(f"{each.name}: {(asked.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    raise CannotBuild(f"{NO_BUILDER}{'; ' * bool(reasons)}{'; '.join(reasons)}")


def build(builder: Builder, variant: str, more: Iterable[str]) -> str:
    """Build the image and return its name. `more` are arguments of the builder. Raises CannotBuild."""
    image = image_name(variant)
    flags = [each.format(image=image) for each in builder.build]
    done = subprocess.run(
        [builder.name, *flags, "--build-arg", f"VARIANT={variant}", *more, str(ROOT)],
        # Mounts of stages and secrets; an engine older than 23 has to be told.
        env=os.environ | {"DOCKER_BUILDKIT": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise CannotBuild(
            f"{builder.name} could not build {image}: it ended with {done.returncode}, the reason is above"
        )
    return image


def layers_of(builder: Builder, image: str) -> list[Layer]:
    """The layers of a built image, lowest first. Raises CannotBuild."""
    command = [builder.name, *(each.format(image=image) for each in builder.save)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as saving:
        layers = read_layers(cast(IO[bytes], saving.stdout))
    if saving.returncode != 0 or not layers:
        raise CannotBuild(f"{builder.name} built {image} and could not read it: it ended with {saving.returncode}")
    return layers


def report(image: str, layers: list[Layer]) -> str:
    """Lines about an image: what it weighs unpacked, and each layer with the instruction that made it."""
    total = sum(each.bytes for each in layers)
    lines = [f"{image}: {total / 1e6:,.0f} MB in {len(layers)} layers, unpacked"]
    lines += [f"{each.bytes / 1e6:10,.1f} MB  {each.made_by[:WIDTH]}" for each in layers]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Build and report; ends with one line on standard error and 1 where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m helm.image", description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    own, more = parser.parse_known_args(arguments)
    try:
        builder, began = find_builder(), time.monotonic()
        image = build(builder, own.variant, more)
        print(f"built by {builder.name} in {time.monotonic() - began:.0f} s")
        print(report(image, layers_of(builder, image)), flush=True)
    except CannotBuild as reason:
        sys.exit(f"image: {reason}")


if __name__ == "__main__":
    main()
