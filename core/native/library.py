"""Compiles a library for this machine, once, into a cache directory, and loads it.

One translation unit and one compiler call, so neither ninja nor setuptools is needed. Built for the processor it runs
on (`-march=native`), therefore never shipped; the key of the cache covers source, flags, torch, Python and processor,
so a cache volume may be shared between unlike machines. `kept_library` says what is fit to be loaded from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from core.native.kept_library import (
    ExtensionUnavailable,
    building,
    digest_path,
    is_whole,
    keep,
    refuse_foreign,
)

FLAGS = tuple("-std=c++20 -O3 -march=native -fno-math-errno -Wno-psabi -pthread -shared -fPIC".split())
"""No -ffast-math: a row that is not finite must be seen by the sampler's check. Sums are spread by hand instead."""
COMPILE_SECONDS = 900.0
_LOADING = threading.Lock()
BUILDING = "building-"
"""Begins the names of directories that a compiler writes into."""
PATHS = (str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if path))
"""Where this process found its modules, whatever directory it runs in."""


def beside(work: Callable[[], None]) -> None:
    """Run `work` on a daemon thread of its own. No thread waits for it, so it does not delay the end of the process."""
    threading.Thread(target=work, name="slipstream-native", daemon=True).start()


@dataclass(frozen=True, slots=True)
class Library:
    """A Python module in C++, which pybind11 (a part of torch) makes."""

    name: str
    at: str
    """`module:attribute` under which the process that compiles finds this again."""
    sources: tuple[Path, ...]
    """The file that is compiled, and those that it includes."""
    uses_torch: bool
    """Whether it is linked with torch. Code that is not compiles in seconds, and its process never imports torch."""
    flags: tuple[str, ...] = FLAGS

    def path(self) -> Path:
        """Path of the compiled code for this machine, whether it exists or not. Raises ExtensionUnavailable."""
        code = tuple(source.read_bytes() for source in self.sources)
        facts = (code, self.flags, importlib.metadata.version("torch"), sys.version, platform.machine(), _processor())
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return cache_directory() / f"{self.name}-{key}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def is_built(self) -> bool:
        """Whether `load` would find it in the cache, whole."""
        try:
            return is_whole(self.path())
        except (OSError, ExtensionUnavailable):
            return False

    def load(self) -> Any:
        """The module, compiled first if need be (seconds to a few minutes). Raises ExtensionUnavailable.

        Of several processes at once one compiles, and the others wait for it.
        """
        path = self.path()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(path.parent)
            if not is_whole(path):
                self._build(path)
            for each in (path, digest_path(path)):
                refuse_foreign(each)
        except OSError as error:
            told = f"the cache in {path.parent} cannot be used: {error.strerror or error}"
            raise ExtensionUnavailable(told) from error
        return self.load_from(path)

    def load_from(self, path: Path) -> Any:
        """The module in a file, whatever it is: a part of a library kills the process. Raises ExtensionUnavailable."""
        if self.uses_torch:
            import torch  # noqa: F401 - the loader finds the libraries that this one is linked with
        try:
            # A second thread would be given the module that the first one is still filling.
            with _LOADING:
                spec = spec_from_file_location(self.name, path, loader=ExtensionFileLoader(self.name, str(path)))
                assert spec is not None and spec.loader is not None
                module = module_from_spec(spec)
                spec.loader.exec_module(module)
        except ImportError as error:
            raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error
        return module

    def compile_command(self, made: Path) -> list[str]:
        """What makes the library at `made`. Raises ExtensionUnavailable."""
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise ExtensionUnavailable("no C++ compiler was found (install g++, or set CXX)")
        linked = _torch_libraries() if self.uses_torch else []
        includes = _torch_includes() if self.uses_torch else [_pybind_include()]
        named = [f"-DTORCH_EXTENSION_NAME={self.name}"]
        for path in (*includes, sysconfig.get_paths()["include"]):
            named += ["-isystem", path]
        return [compiler, *self.flags, *named, str(self.sources[0]), "-o", str(made), *linked]

    def _build(self, path: Path) -> None:
        """Compile, prove and keep, unless another process has by then. Raises ExtensionUnavailable, OSError."""
        with building(path, COMPILE_SECONDS) as alone:
            if alone and is_whole(path):
                return
            begins = f"{BUILDING}{path.name.partition('.')[0]}-"
            if alone:
                for left in path.parent.glob(f"{begins}*"):  # by a build that was killed
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=begins, dir=path.parent, ignore_cleanup_errors=True) as directory:
                made = Path(directory) / path.name
                _compile(self.at, made)
                keep(made, path)


def library_at(place: str) -> Library:
    """The library of a `Library.at`."""
    module, _, attribute = place.partition(":")
    found: Library = getattr(import_module(module), attribute)
    return found


def cache_directory() -> Path:
    """Directory of compiled code: `SLIPSTREAM_CACHE_DIR`, else the user's cache. Raises ExtensionUnavailable."""
    given = os.environ.get("SLIPSTREAM_CACHE_DIR")
    try:
        base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
    except RuntimeError:  # the user of a container need not be known to it
        raise ExtensionUnavailable("there is no home directory to keep it in; set SLIPSTREAM_CACHE_DIR") from None
    return base / "native"


def _compile(at: str, made: Path) -> None:
    """Have a process make and load the library; the process and its compilers end with this one."""
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "core.native.compile_process", at, str(made)],
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
            # A group to end it with; and Ctrl-C at the terminal is for the server, which drains first.
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ExtensionUnavailable(f"compiling it took longer than {COMPILE_SECONDS:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    if process.returncode < 0:
        raise ExtensionUnavailable(f"what was compiled ended its process with signal {-process.returncode}")
    if process.returncode:
        raise ExtensionUnavailable((said.strip().splitlines() or ["the process that compiles failed"])[-1])


def _torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return list(include_paths())


def _pybind_include() -> str:
    """Where pybind11 is, found without the seconds that importing torch takes."""
    found = find_spec("torch")
    assert found is not None and found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0]) / "include")


def _torch_libraries() -> list[str]:
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


def main(library: Library) -> None:
    """What `python -m` of a module with a library does: make it sure, and print where it is."""
    try:
        library.load()
        print(library.path())
    except ExtensionUnavailable as reason:
        sys.exit(f"no native code: {reason}")
