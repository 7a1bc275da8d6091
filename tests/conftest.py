"""What every test starts from: one thread of math, one printed seed, no network beyond this machine."""

from __future__ import annotations

import ipaddress
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Before anything imports a Hugging Face library, which reads these once.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from core.invariants import FAILURES
from core.models.native.extension import DECODER
from core.native.host import HOST
from service.process.switch_interval import shorten_switch_interval
from tests.support import scorecard as scores
from tests.support.at_hand import plugins
from tests.support.fork_server import fork_server
from tests.support.newer import too_old
from tests.support.nightly import NIGHTLY
from tests.support.repository import ROOT
from tests.support.skips import SkipWatch

scorecard = scores.scorecard

# Fixtures that more than one folder of tests uses.
pytest_plugins = ("tests.support.stand_ins", "tests.support.log_lines", "tests.support.workers", *plugins())

# Results must not depend on how many cores reduce a sum, and two cores are all that CI has.
torch.set_num_threads(1)

# As `serve` does. A loop that turns and turns lets go of the interpreter for a microsecond each time. At Python's 5 ms
# a forward thread waits for a timer that starts anew each time: an engine stood still beside such a test for 14 s.
shorten_switch_interval(writes=True)

# Under `nohup` it is ignored, processes inherit that, and a server goes by it. A signal that is handled has its default
# in them. Not by `preexec_fn`: that makes Python fork, and gRPC's threads here may hang such a child before it begins.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

SEED_ENV = "SLIPSTREAM_TEST_SEED"
COMPILING = pytest.StashKey[list[subprocess.Popen[bytes]]]()

# What a developer's shell says about their own server must not reach the servers of the tests.
for _name in [name for name in os.environ if name.startswith(("SLIPSTREAM_", "OTEL_")) and name != SEED_ENV]:
    del os.environ[_name]
# Compiled into before the first test, so that no server of a test compiles beside what it is tested for.
os.environ["SLIPSTREAM_CACHE_DIR"] = str(ROOT / "build" / "cache")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the whole suite."""
    parser.addoption("--listed-skips", action="store_true", help="fail on skips that tests/skips.txt does not list")
    parser.addoption("--built-image", action="store_true", help="run the image that `make image` built, under podman")
    parser.addoption("--no-decoder", action="store_true", help="do not wait a minute for the native decoder's compiler")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run, unless one was asked for, before Hypothesis reads its option.

    Into the environment as well: a run of pytest that a test starts draws from the seed of the report.
    """
    if config.getoption("listed_skips", False):
        config.pluginmanager.register(SkipWatch())
    if config.option.hypothesis_seed is None:
        drawn = str(random.SystemRandom().randrange(2**32))
        config.option.hypothesis_seed = os.environ.setdefault(SEED_ENV, drawn)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to the night, and what older packages fail.

    While the scorecard is made, only tests that record something run.
    """
    for item in items:
        if item.nodeid in NIGHTLY or item.nodeid.partition("[")[0] in NIGHTLY:
            item.add_marker("nightly")
        if (reason := too_old(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    if os.environ.get(scores.FILE_ENV):
        kept = scores.only_recording(items)
        scores.note_session(config, kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionstart(session: pytest.Session) -> None:
    """Workers find what was made before them: compiled code, a minute once per checkout, and a fork server."""
    if session.config.option.workers:
        fork_server()
    made = [(HOST, "core.native.host"), (DECODER, "core.models.native.extension")]
    if session.config.option.no_decoder:
        made.pop()
    compiling = [
        subprocess.Popen([sys.executable, "-m", name], cwd=ROOT) for library, name in made if not library.is_built()
    ]
    session.config.stash[COMPILING] = compiling


def pytest_collection_finish(session: pytest.Session) -> None:
    """The compilers had the time of the collection. What could not be made says so, and tests that need it skip."""
    for process in session.config.stash[COMPILING]:
        process.wait()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Tells the scorecard which of its tests ran; the report itself is pytest's own."""
    scores.note_outcome(item, call)


def pytest_report_header(config: pytest.Config) -> str:
    """The line from which a failing run is replayed."""
    return f"seed: {config.option.hypothesis_seed} (replay with {SEED_ENV}={config.option.hypothesis_seed})"


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run, for tests that make their own generators."""
    return int(pytestconfig.option.hypothesis_seed)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint_of(kind)`: a directory with a small model of that kind, one for all tests. To be read only."""
    from tests.support.checkpoints import make_checkpoint

    @cache
    def made(kind: str) -> Path:
        return make_checkpoint(kind, tmp_path_factory.mktemp(kind))

    return made


@pytest.fixture(scope="session")
def bundled_tokenizer() -> Any:
    """Of the bundled model: a `core.text.tokenizer.Tokenizer`."""
    from core.models.bundled import bundled_model_dir
    from core.text.tokenizer import Tokenizer

    return Tokenizer.load(str(bundled_model_dir()))


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Every test sees the same global randomness, alone or in the suite."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


CABLES = ipaddress.ip_network("198.18.0.0/15")
"""Reserved for tests of networks (RFC 2544): those that tests make."""


def _is_local(host: Any) -> bool:
    if host in ("", "localhost", None):
        return True
    name = host.decode() if isinstance(host, bytes) else str(host)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or address in CABLES


def _refuse(host: Any) -> None:
    if not _is_local(host):
        raise ConnectionRefusedError(f"tests may not reach {host!r}: nothing is downloaded")


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Python sockets reach this machine only; names other than localhost are not looked up."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def guarded(real: Any) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _refuse(address[0])
            return real(self, address)

        return call

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(connect))
        patch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
        patch.setattr(socket, "getaddrinfo", look_up)
        yield


@pytest.fixture(autouse=True)
def _own_failures() -> Iterator[None]:
    """Violations are counted per process, for a server has one engine; tests that provoke some take them along."""
    FAILURES.update(dict.fromkeys(FAILURES, 0))
    before = FAILURES.copy()
    yield
    FAILURES.clear()
    FAILURES.update(before)
