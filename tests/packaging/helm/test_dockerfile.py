"""The Dockerfile is linted, and what it runs is run here as far as that needs no Docker."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.packaging.helm.chart import Helm4
from tests.packaging.helm.dockerfile import FILE, Stage, ignored, stages
from tests.packaging.helm.matrix import CPU
from tests.support.repository import ROOT

pytestmark = pytest.mark.tools

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = stages()


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    found = str(program) if program.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (pip install '.[dev]')")
    command = [found, "--failure-threshold", "style", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_has_nothing_to_say() -> None:
    done = hadolint(FILE)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "line, rule",
    [
        ("RUN sudo true", "DL3004"),
        ("RUN apt-get update && apt-get install curl", "DL3014"),
        ("CMD slipstream", "DL3025"),
    ],
)
def test_hadolint_notices(tmp_path: Path, line: str, rule: str) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(f"{FILE.read_text()}{line}\n")
    assert rule in hadolint(file).stdout


@pytest.mark.parametrize("variant, more", [("cpu", ()), ("cuda", ("cuda", "nixl"))])
def test_requirements_are_those_of_the_project(tmp_path: Path, variant: str, more: tuple[str, ...]) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = STAGES["requirements"].all("RUN")[0].replace("python -c", f"{shlex.quote(sys.executable)} -c")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env={"VARIANT": variant}, check=True, timeout=60)
    extras = ("quantization", "grammar", "vision", "gateway", "otel", *more)
    optional = [each for extra in extras for each in PROJECT["optional-dependencies"][extra]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [*PROJECT["dependencies"], *optional]


def chosen(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The index of PyTorch that the build chooses; empty: the one of all packages."""
    (choice,) = re.findall(r"case .*? esac", STAGES["requirements"].runs()[1])
    command = ["sh", "-c", f'{choice}; echo "[$index]"']
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("variant, index", [("cpu", "https://download.pytorch.org/whl/cpu"), ("cuda", "")])
def test_variants(variant: str, index: str) -> None:
    assert chosen({"VARIANT": variant}).stdout == f"[{index}]\n"
    mirror = "https://mirror.example/simple"
    assert chosen({"VARIANT": variant, "TORCH_INDEX": mirror}).stdout == f"[{mirror}]\n"


def test_another_variant_is_refused() -> None:
    refused = chosen({"VARIANT": "rocm"})
    assert refused.returncode == 1 and "cpu or cuda" in refused.stderr


def test_mirrors_are_build_arguments_of_every_stage_that_downloads() -> None:
    assert STAGES["python"].base == "${REGISTRY}/python:${PYTHON}-slim-bookworm"
    for stage in (STAGES["requirements"], STAGES["wheel"]):
        assert "PIP_INDEX_URL" in stage.all("ARG")
        # A secret, so that a password in it is in no layer.
        assert "--mount=type=secret,id=pip,target=/etc/pip.conf" in stage.all("RUN")[-1]
    install = STAGES["requirements"].runs()[1]
    assert '${index:+--index-url "${index}"} "${TORCH}"' in install


def test_versions_are_those_of_the_project() -> None:
    text = FILE.read_text()
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", text, re.MULTILINE)
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")
    (torch,) = re.findall(r"^ARG TORCH=(.*)$", text, re.MULTILINE)
    assert f"TORCH ?= {torch}\n" in (ROOT / "Makefile").read_text()
    assert f"slipstream:{PROJECT['version']}-cpu" in text


def test_the_chart_and_the_image_agree(helm4: Helm4, image: Stage) -> None:
    rendered = helm4.render(CPU | {"metrics": {"enabled": True}})
    security = rendered.pod["securityContext"]
    assert image.all("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert f"--uid {security['runAsUser']}" in image.all("RUN")[0]
    opened = {str(each["containerPort"]) for each in rendered.server["ports"]}
    assert set(image.all("EXPOSE")[0].split()) == opened
    told = {each["name"]: each["value"] for each in rendered.server["env"]}
    assert {name: told[name] for name in image.env.keys() & told.keys()} == {
        name: image.env[name] for name in ("SLIPSTREAM_CACHE_DIR", "HF_HUB_OFFLINE")
    }


def test_what_is_copied_is_there_and_little_else_is_sent() -> None:
    sources = [each for stage in STAGES.values() for line in stage.all("COPY") for each in line.split()[:-1]]
    copied = [each for each in sources if not each.startswith(("--", "/"))]
    assert {"core", "service", "pyproject.toml"} <= set(copied)
    for each in copied:
        assert (ROOT / each).exists() and not ignored(each), each
    for each in (".git/config", "tests/conftest.py", "helm/README.md", "build/x", "core/__pycache__/a.pyc", ".venv/a"):
        assert ignored(each), each
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == set(copied), "only what is copied"


def test_the_wheel_has_every_file_that_is_tracked(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "core", "service"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a checkout")
    packed = set(zipfile.ZipFile(wheel).namelist())
    documents = {each for each in tracked if each.endswith(".md")}
    installed = {each.removeprefix("service/exported/") for each in set(tracked) - documents}
    assert installed <= packed, "an image would lack them"


def test_the_server_is_a_layer_of_its_own(image: Stage) -> None:
    """The order is what keeps an upgrade small: requirements first, then the wheel, without its dependencies."""
    order = [f"{word} {argument}" for word, argument in image.instructions]
    first = next(at for at, each in enumerate(order) if each.startswith("COPY --from=requirements"))
    second = next(at for at, each in enumerate(order) if each.startswith("COPY --from=server"))
    assert first < second and "--no-deps" in STAGES["server"].runs()[-1]
    assert "core" not in " ".join(STAGES["requirements"].all("COPY"))


def test_no_step_depends_on_a_mount_of_another_stage() -> None:
    """Podman and buildah would take it from their cache though the stage has changed."""
    assert not [each for stage in STAGES.values() for each in stage.all("RUN") if "type=bind" in each]
