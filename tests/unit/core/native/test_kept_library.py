"""Compiled code is loaded only where it is whole and ours; compilers end with the server that wanted it."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native.extension import is_built, load_extension
from core.models.native.family import UpgradingModel
from core.native import library as library_module
from core.native.host import HOST
from core.native.kept_library import ExtensionUnavailable, digest_path, is_whole, keep
from tests.support.fork_server import ForkedProcess, fork_server
from tests.support.until import eventually
from tests.unit.core.models.test_native import CPU, Make

PATIENCE = 120.0
NOBODY = 65534
PROGRAM = "core.native.host"


@pytest.fixture(scope="module")
def library() -> Path:
    """One that a compiler made, before these tests move the cache: the smaller one, whose process imports no torch."""
    try:
        HOST.load()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
    return HOST.path()


@pytest.fixture
def cache(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that takes no half a minute: it copies, and writes a line to `compiled`."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo compiling >> {tmp_path}/compiled\n"
        f"test -e {tmp_path}/slow && sleep 100\n"
        'while [ "$1" != "-o" ]; do shift; done\n'
        f'sleep 0.5; cp "{tmp_path}/result" "$2"\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "result").write_bytes(library.read_bytes())
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def compiled(cache: Path) -> int:
    """How often the compiler ran."""
    said = cache.parents[1] / "compiled"
    return len(said.read_text().splitlines()) if said.exists() else 0


def sound() -> bool:
    kept = HOST.path()
    return hashlib.sha256(kept.read_bytes()).hexdigest() == digest_path(kept).read_text().strip()


@contextmanager
def begun() -> Iterator[ForkedProcess]:
    """Loads it in a process of its own, which a part of a library would kill."""
    process = fork_server().start(PROGRAM, [], os.environ | {"OMP_NUM_THREADS": "1"})
    with process.stdin, process.stdout, process.stderr:
        yield process


def kept_in(cache: Path, library: Path) -> Path:
    """The library in the cache, as if this process had compiled it."""
    cache.mkdir(parents=True, mode=0o700)
    kept = HOST.path()
    kept.write_bytes(library.read_bytes())
    digest_path(kept).write_text(hashlib.sha256(kept.read_bytes()).hexdigest() + "\n")
    for each in (kept, digest_path(kept)):
        each.chmod(0o700)
    return kept


def run() -> tuple[int, str]:
    """The exit status of such a process, and what it wrote to its standard error."""
    with begun() as process:
        return process.wait(PATIENCE), process.stderr.read()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forget_digest(path: Path) -> None:
    digest_path(path).unlink()


@pytest.mark.parametrize("harm", [cut_short, spoil, forget_digest, lambda path: path.write_bytes(b"")])
def test_what_is_not_whole_is_not_taken_for_built(cache: Path, library: Path, harm: Callable[[Path], None]) -> None:
    kept = kept_in(cache, library)
    assert HOST.is_built()
    harm(kept)
    assert not HOST.is_built(), "a server would compile before it serves"


def test_what_is_not_whole_is_compiled_again(cache: Path, library: Path) -> None:
    cut_short(kept_in(cache, library))
    code, told = run()
    assert code == 0, told
    assert compiled(cache) == 1 and sound()
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".sha256", ".so"]
    assert run()[0] == 0 and compiled(cache) == 1, "what is whole is loaded as it is"


def test_what_the_compiler_made_is_loaded_elsewhere_first(cache: Path) -> None:
    """Half a library of the right name, as a full disk leaves it, kills the process that loads it."""
    cut_short(cache.parents[1] / "result")
    code, told = run()
    assert code == 1 and "ended its process with signal" in told, (code, told)
    assert not HOST.is_built() and [path.suffix for path in cache.iterdir()] == [".lock"]


def test_two_servers_compile_once(cache: Path) -> None:
    with begun() as one, begun() as other:
        assert [process.wait(PATIENCE) for process in (one, other)] == [0, 0]
        assert [process.stdout.read() for process in (one, other)] == [f"{HOST.path()}\n"] * 2
    assert compiled(cache) == 1 and sound()


def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"name {target.name}")
        replace(self, target)
        return target

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    made = tmp_path / "made"
    made.mkdir()
    (made / "lib.so").write_bytes(b"code")
    keep(made / "lib.so", tmp_path / "lib.so")
    begun = ["sync lib.so", "sync lib.so.sha256", "name lib.so", "name lib.so.sha256"]
    assert done == [*begun, f"sync {tmp_path.name}"] and is_whole(tmp_path / "lib.so")


def test_whatever_the_umask_the_library_is_ours_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        HOST.load()
        HOST.load()
    finally:
        os.umask(before)
    assert compiled(cache) == 1


def test_without_locks_the_last_one_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    HOST.load()
    assert compiled(cache) == 1 and sound()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_server(cache: Path, number: signal.Signals) -> None:
    (cache.parents[1] / "slow").touch()
    with begun() as server:
        eventually(lambda: len(compilers(server.pid)) >= 3, PATIENCE)
        found = compilers(server.pid)
        server.send_signal(number)
        server.wait(PATIENCE)
    # The process that compiles, the compiler, and what that started.
    eventually(lambda: not any(map(running, found)), 20.0)


def compilers(pid: int) -> list[int]:
    """Its children, theirs and so on."""
    children: list[int] = []
    # Threads and processes end while they are looked at.
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return [*children, *(each for child in children for each in compilers(child))]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("whose", ["group", "others", "another user", "the digest"])
def test_what_others_could_have_written_is_not_loaded(cache: Path, library: Path, whose: str) -> None:
    kept = kept_in(cache, library)
    HOST.load()
    if whose == "another user":
        os.chown(cache, NOBODY, NOBODY)
    else:
        path, mode = {"group": (cache, 0o770), "others": (kept, 0o757), "the digest": (digest_path(kept), 0o666)}[whose]
        path.chmod(mode)
    with pytest.raises(ExtensionUnavailable, match="others can write"):
        HOST.load()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may enter and write everything; the user of a container may not."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["not to be entered", "not to be written"])
def test_a_cache_of_root_costs_a_line_of_the_log(
    checkpoint_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """As the tmpfs of a container is, whose server runs as another user."""
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)  # directories of pytest are closed to other users
    tmp_path.chmod(0o711)
    root_owned = tmp_path / "tmpfs"
    root_owned.mkdir()
    root_owned.chmod(mode)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(root_owned))
    path = checkpoint_of("llama")
    with caplog.at_level(logging.WARNING), as_nobody():
        assert told(is_built) == "False"
        assert "cannot be used: Permission denied" in told(load_extension)
    monkeypatch.setattr("core.models.native.family.load_extension", lambda: _as_nobody(load_extension))
    monkeypatch.setattr("core.models.native.family.is_built", lambda: _as_nobody(is_built))
    with caplog.at_level(logging.WARNING):
        model = load_model(ModelConfig(str(path), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and not model.native
    (line,) = [record for record in caplog.records if record.name == "core.models.native.family"]
    assert "no native code" in line.getMessage() and line.exc_info is None


def told(function: Callable[[], object]) -> str:
    """What it gives, or raises."""
    try:
        return repr(function())
    except Exception as error:
        return repr(error)


def _as_nobody(function: Callable[[], object]) -> object:
    with as_nobody():
        return function()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SLIPSTREAM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library_module.Path, "home", no_home)
    assert not HOST.is_built()
    with pytest.raises(ExtensionUnavailable, match="set SLIPSTREAM_CACHE_DIR"):
        HOST.load()
