"""Compiles the decoder for this machine, once, into a cache directory, and loads it.

One translation unit and one compiler call, so neither ninja nor setuptools is needed. Built for the processor it runs
on (`-march=native`), therefore never shipped; the key of the cache covers source, flags, torch, Python and processor,
so a cache volume may be shared between unlike machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

NAME = "slipstream_decoder"
PARTS = "decoder.cpp attention.h bytes.h kernels.h linear.h panels.h scratch.h sharing.h team.h vectors.h".split()
SOURCES = tuple(Path(__file__).with_name(name) for name in PARTS)
"""What is compiled, and what that includes."""
FLAGS = "-std=c++20 -O3 -march=native -fno-math-errno -Wno-psabi -pthread -shared -fPIC".split()
"""No -ffast-math: a row that is not finite must be seen by the sampler's check. Sums are spread by hand instead."""
COMPILE_SECONDS = 900.0
BUILDING = "building-"
"""Begins the names of directories that a compiler writes into."""


class ExtensionUnavailable(Exception):
    """It cannot be built here; the message says why, in one line."""


def cache_directory() -> Path:
    """Where compiled code is kept: `SLIPSTREAM_CACHE_DIR`, else the user's cache."""
    given = os.environ.get("SLIPSTREAM_CACHE_DIR")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
    return base / "native"


def library_path() -> Path:
    """Where the code for this machine is, or would be."""
    code = tuple(source.read_bytes() for source in SOURCES)
    facts = (code, FLAGS, torch.__version__, sys.version, platform.machine(), _processor())
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return cache_directory() / f"{NAME}-{key}{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_built() -> bool:
    """Whether `load_extension` would find it in the cache."""
    return library_path().exists()


def load_extension() -> Any:
    """The module, compiled first if need be (half a minute to a few). Raises ExtensionUnavailable.

    Safe to call from several processes at once: each compiles beside the cache and renames what it made.
    """
    path = library_path()
    if not path.exists():
        _compile(path)
    for each in (path, path.parent):
        facts = each.stat()
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
            raise ExtensionUnavailable(f"others can write to {each}, and what is there would be run")
    try:
        spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error
    return module


def _compile(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ExtensionUnavailable("no C++ compiler was found (install g++, or set CXX)")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as directory:
            _sweep(path.parent, Path(directory).stat().st_mtime)
            made = Path(directory) / path.name
            command = [compiler, *FLAGS, *_includes(), str(SOURCES[0]), "-o", str(made), *_libraries()]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False, stdin=subprocess.DEVNULL
            )
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
                raise ExtensionUnavailable(f"{compiler} failed: {first.strip()}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExtensionUnavailable(f"it could not be compiled: {error}") from error


def _sweep(directory: Path, now: float) -> None:
    """Remove what killed builds left: a server may stop while it compiles. `now` by the clock of the files."""
    for left in directory.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if now - left.stat().st_mtime > COMPILE_SECONDS:
                shutil.rmtree(left)


def _includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    found = [*include_paths(), sysconfig.get_paths()["include"]]
    return [f"-DTORCH_EXTENSION_NAME={NAME}", *(argument for path in found for argument in ("-isystem", path))]


def _libraries() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    return [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


if __name__ == "__main__":
    try:
        load_extension()
        print(library_path())
    except ExtensionUnavailable as reason:
        sys.exit(f"no native code: {reason}")
