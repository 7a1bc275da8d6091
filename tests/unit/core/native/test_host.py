"""The host's compiled code is fetched as the setting says, and its absence costs nothing but speed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.native import host
from core.native.host import HOST, HostCode
from core.native.kept_library import ExtensionUnavailable


def test_off_means_off() -> None:
    code = HostCode()
    code.fetch("off")
    assert code.module is None


def test_what_was_compiled_before_is_there_at_once() -> None:
    if not HOST.is_built():
        pytest.skip("no native code here")
    code = HostCode()
    code.fetch("auto")
    called = {"Relay", "SuffixDrafter", "draw", "peaks", "scale"}
    assert code.module is not None and called <= set(dir(code.module))


@pytest.mark.parametrize("error", [ExtensionUnavailable("no compiler"), RuntimeError("a panic")])
def test_python_goes_on_without_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def is_built(self) -> bool:
            return False

        def load(self) -> object:
            raise error

    monkeypatch.setattr(host, "HOST", Broken())
    code = HostCode()
    code.fetch("wait")
    assert code.module is None and "Python goes on" in caplog.text


def test_a_source_that_does_not_compile_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ExtensionUnavailable):
        replace(HOST).load()


def test_threads_that_load_it_at_once_get_all_of_it() -> None:
    """In a process that has not loaded it yet: engines of one process load it in threads of their own."""
    if not HOST.is_built():
        pytest.skip("no native code here")
    code = (
        "import sys, threading\n"
        "from core.native.host import HOST\n"
        "sys.setswitchinterval(1e-6)\n"
        "path, together, found = HOST.path(), threading.Barrier(8), []\n"
        "def load():\n"
        "    together.wait()\n"
        "    found.append(hasattr(HOST.load_from(path), 'Relay'))\n"
        "threads = [threading.Thread(target=load) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(all(found), len(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "8"]
