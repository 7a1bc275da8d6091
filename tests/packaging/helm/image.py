"""What the Dockerfile installs, installed here: the wheel that its stage builds, in a virtual environment."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.packaging.helm.container import PREFIX
from tests.packaging.helm.dockerfile import Stage, copy_in

INSTALL_SECONDS = 120


def build_wheel(stage: Stage, folder: Path) -> Path:
    """Do what the stage does, in `folder`: copy, then build. The wheel."""
    source, made = folder / "src", folder / "dist"
    source.mkdir()
    copy_in(stage, source)
    (line,) = stage.runs()
    command = [str(made) if word == "/dist" else word for word in shlex.split(line)]
    assert command[:2] == ["pip", "wheel"]
    # The tools of the build are those of this environment: nothing is downloaded.
    _run(sys.executable, "-m", *command[:2], "--no-build-isolation", *command[2:], folder=source)
    (wheel,) = made.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel, over the packages of this one; made to lie at `/opt/slipstream`."""
    prefix = folder / "prefix"
    _run(sys.executable, "-m", "venv", "--without-pip", str(prefix))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)}))
    (site / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = ("--python", str(prefix / "bin" / "python"))
    _run(sys.executable, "-m", "pip", *python, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    script = prefix / "bin" / "slipstream"
    script.write_text(script.read_text().replace(str(prefix), PREFIX))
    return prefix


def _run(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
