"""The Dockerfile as instructions by stage, to run those of them for real that need no Docker."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

FILE = ROOT / "Dockerfile"


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """Arguments of every instruction of this kind."""
        return [argument for word, argument in self.instructions if word == keyword]

    def runs(self) -> list[str]:
        """Every RUN without its mounts."""
        return [re.sub(r"^(--mount=\S+ )+", "", each) for each in self.all("RUN")]

    def command(self, keyword: str) -> list[str]:
        """The last instruction of this kind in its JSON form."""
        found: list[str] = json.loads(self.all(keyword)[-1])
        return found

    @property
    def env(self) -> dict[str, str]:
        """What ENV sets, in order, each referring to those before it and to the PATH of the base."""
        found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for line in self.all("ENV"):
            for each in shlex.split(line):
                name, _, value = each.partition("=")
                found[name] = re.sub(r"\$(\w+)", lambda used: found.get(used[1], ""), value)
        return found

    @property
    def healthcheck(self) -> list[str]:
        """The command of HEALTHCHECK."""
        found: list[str] = json.loads(self.all("HEALTHCHECK")[-1].partition("CMD ")[2])
        return found


def stages(file: Path = FILE) -> dict[str, Stage]:
    """Stages by name."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        keyword, _, argument = line.strip().partition(" ")
        if keyword == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = Stage(base, name)
        elif keyword and found:
            next(reversed(found.values())).instructions.append((keyword, argument.strip()))
    return found


def ignored(path: str, file: Path = ROOT / ".dockerignore") -> bool:
    """Whether .dockerignore keeps a file of the repository out of the build; the last pattern that matches decides."""
    out = False
    for line in filter(None, map(str.strip, file.read_text().splitlines())):
        if not line.startswith("#"):
            pattern = line.lstrip("!")
            parts = [re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("/") if part != "**"]
            start = "(.*/)?" if pattern.startswith("**/") else ""
            if re.fullmatch(f"{start}{'/'.join(parts)}(/.*)?", path):
                out = not line.startswith("!")
    return out


def copy_in(stage: Stage, folder: Path) -> None:
    """Do the COPY instructions of a stage whose WORKDIR is `folder`."""
    for line in stage.all("COPY"):
        *sources, target = line.split()
        for source in sources:
            _copy(source, folder / target, into=target.endswith(("/", ".")))


def _copy(source: str, target: Path, *, into: bool) -> None:
    origin = ROOT / source
    paths: list[Any] = [each for each in origin.rglob("*") if each.is_file()] if origin.is_dir() else [origin]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if not ignored(name):
            below = path.relative_to(origin) if origin.is_dir() else path.name
            goal = target / below if origin.is_dir() or into else target
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.write_bytes(path.read_bytes())
