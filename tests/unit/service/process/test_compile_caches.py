"""A directory of compiled code that cannot be written costs a line, and no start."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.errors import StartupError
from core.models.bundled import bundled_model_dir
from service.process.compile_caches import NAMES, use_writable_caches


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path below a file: no user can make it, root included."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


def test_what_can_be_written_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {name: str(tmp_path / "volume" / name) for name in NAMES}
    environ = dict(given)
    use_writable_caches(environ)
    assert environ == given and not caplog.records
    assert all(Path(path).is_dir() and not list(Path(path).iterdir()) for path in given.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_gives_way_to_a_directory_of_our_own(
    name: str, blocked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {name: str(blocked)}
    with caplog.at_level(logging.WARNING):
        use_writable_caches(environ)
    fresh = Path(environ[name])
    assert fresh.parent == Path(tempfile.gettempdir()) and fresh.stat().st_mode & 0o777 == 0o700
    assert caplog.messages == [f"{name} {blocked} cannot be used (Not a directory): {fresh} takes its place"]
    fresh.rmdir()


@pytest.mark.parametrize("named", [True, False])
def test_without_any_place_one_line_says_so(named: bool, blocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(StartupError, match="mount one at /tmp, or name it in TMPDIR") as refused:
        use_writable_caches({NAMES[0]: str(blocked)} if named else {})
    assert (str(blocked) in refused.value.message) is named


def test_a_place_for_pytorch_is_enough_where_nothing_temporary_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_writable_caches({NAMES[0]: str(tmp_path)})
    asked: list[str] = []
    monkeypatch.setattr(tempfile, "gettempdir", lambda: asked.append("asked") or "/nothing")
    use_writable_caches({NAMES[0]: str(tmp_path)})
    assert not asked


def told(*command: str, blocked: Path, folder: Path) -> tuple[int, str]:
    """Exit code and errors of a command of ours that imports PyTorch."""
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(blocked), "TMPDIR": str(folder)}
    run = [sys.executable, "-m", "service", *command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert f"TORCHINDUCTOR_CACHE_DIR {blocked} cannot be used (Not a directory)" in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["check", "serve"])
def test_commands_look_before_they_import_what_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own show that it is early enough: the two tests below."""
    module = importlib.import_module(f"service.cli.commands.{name}")

    def looked(environ: object) -> None:
        raise LookedError(environ is os.environ)

    monkeypatch.setattr(module, "use_writable_caches", looked)
    monkeypatch.setattr(module, "configure", lambda level: None, raising=False)
    answer = CliRunner().invoke(getattr(module, name), ["--port=0", "--metrics-port=0"] if name == "serve" else [])
    assert isinstance(answer.exception, LookedError) and answer.exception.args == (True,), answer.output


class LookedError(Exception):
    """Nothing but it is to happen."""


def test_a_model_is_loaded_in_spite_of_it(blocked: Path, tmp_path: Path) -> None:
    code, errors = told("check", "--native", "off", blocked=blocked, folder=tmp_path)
    assert code == 0, errors


def test_a_server_goes_on_to_its_model(blocked: Path, tmp_path: Path) -> None:
    """One that it then refuses, so that it ends by itself."""
    model = Path(shutil.copytree(bundled_model_dir(), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["No"], "model_type": "nonesuch"}))
    ports = ("--port=0", "--metrics-port=0")
    code, errors = told("serve", f"--model={model}", *ports, blocked=blocked, folder=tmp_path)
    assert code == 3 and "model type 'nonesuch' is unknown" in errors
