"""The host's compiled code is fetched as the setting says, and its absence costs nothing but speed."""

from __future__ import annotations

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
