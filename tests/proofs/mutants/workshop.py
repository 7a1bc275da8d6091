"""Where mutants are tried: a copy of the tree, and a warm interpreter that runs one test in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.proofs.mutants.mutant import Mutant, Verdict
from tests.support.repository import ROOT

COPIED = ("core", "service", "docs", "tests", "protos", "pyproject.toml")
CACHE = "build/cache"
WARM = ("numpy", "torch", "hypothesis", "grpc", "grpc_status.rpc_status", "grpc_health.v1.health", "tokenizers")
"""Imported once for all trials, beside pytest: what most tests need from outside the tree, and starts no thread."""
SEED = "1"
"""Of every trial: a verdict depends on the tree alone."""
TEST_SECONDS = 60
RUN_SECONDS = 180
"""Of one run of pytest, which may compile native code."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one mutant. `test`, `where` and `text`: the assertion that killed it, or what happened instead."""

    verdict: Verdict
    how: str
    test: str
    where: str
    text: str
    seconds: float


class Workshop:
    """One mutant at a time, in a copy of `source`, which is never touched. Close it, or the interpreter stays."""

    def __init__(self, directory: Path, source: Path = ROOT, warm: tuple[str, ...] = WARM) -> None:
        self.root = directory / "tree"
        self._notes = directory / "notes"
        self._notes.mkdir(parents=True)
        self.root.mkdir()
        for each in (source / name for name in COPIED):
            if each.is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "node_modules")
                shutil.copytree(each, self.root / each.name, ignore=skipped)
            else:
                shutil.copy(each, self.root)
        # Native code is compiled anew only where a mutant breaks that.
        (self.root / "build").mkdir()
        (ROOT / CACHE).mkdir(parents=True, exist_ok=True)
        (self.root / CACHE).symlink_to((ROOT / CACHE).resolve())
        self._changes = 0
        self._interpreter = warm_interpreter(self.root, warm)

    def close(self) -> None:
        """End the interpreter and what it runs."""
        with self._interpreter as process:
            process.terminate()

    def try_one(self, mutant: Mutant) -> Trial:
        """Apply, run the named test, restore. A mutant that does not fit the code is BROKEN."""
        path = self.root / mutant.file
        original, times = path.read_text(), path.stat()
        try:
            path.write_text(mutant.applied(original))
        except ValueError as unfit:
            return Trial(Verdict.BROKEN, "error", mutant.test, mutant.file, str(unfit), 0.0)
        # Compiled files are told apart by their source's time in seconds and its length: two mutants may share both.
        self._changes += 1
        os.utime(path, (self._changes, self._changes))
        try:
            return self._try(mutant)
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def passes(self, test: str) -> bool:
        """Whether the test passes on the unbroken copy: else its failure on a broken one would prove nothing."""
        return self.run(test)["how"] == "passed"

    def _try(self, mutant: Mutant) -> Trial:
        began = time.monotonic()
        seen = self.run(mutant.test)
        verdict = mutant.verdict(seen["how"])
        return Trial(verdict, seen["how"], seen["test"], seen["where"], seen["text"], time.monotonic() - began)

    def run(self, test: str) -> dict[str, str]:
        """What `tests.proofs.mutants.witness` saw of the test."""
        seen, log = self._notes / "witness.json", self._notes / "log"
        seen.unlink(missing_ok=True)
        arguments = [
            *("-x", "-q", "-p", "no:cacheprovider", "-p", "tests.proofs.mutants.witness", f"--witness={seen}"),
            # What is imported beforehand cannot be rewritten, and needs no rewriting.
            *("-W", "ignore::pytest.PytestAssertRewriteWarning", f"--timeout={TEST_SECONDS}", test),
        ]
        status = self._order({"arguments": arguments, "log": str(log), "seconds": RUN_SECONDS})
        if seen.exists():
            found: dict[str, str] = json.loads(seen.read_text())
            return found
        if status is None:
            return {"how": "timeout", "test": test, "where": "", "text": f"no end after {RUN_SECONDS} s"}
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else ""
        return {"how": "error", "test": test, "where": "", "text": f"exit status {status}: {tail}"}

    def _order(self, order: dict[str, object]) -> int | None:
        """Returns the exit status of pytest, None where it was killed. Raises RuntimeError if the interpreter died."""
        assert self._interpreter.stdin is not None and self._interpreter.stdout is not None
        self._interpreter.stdin.write(json.dumps(order) + "\n")
        self._interpreter.stdin.flush()
        answer = self._interpreter.stdout.readline()
        if not answer:
            raise RuntimeError(f"the interpreter of {self.root} died with status {self._interpreter.wait()}")
        status: int | None = json.loads(answer)["status"]
        return status


def warm_interpreter(root: Path, modules: tuple[str, ...]) -> subprocess.Popen[str]:
    """Starts `forkserver.py` in `root`, in a session of its own and without what the caller's shell says to pytest."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SLIPSTREAM_"))}
    # Without compiled files each trial would compile the tree and its tests anew.
    for name in ("SCORECARD_FILE", "PYTHONDONTWRITEBYTECODE"):
        ours.pop(name, None)
    # As tests/conftest.py sets them, before anything imports a Hugging Face library.
    ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ours |= {"SLIPSTREAM_TEST_SEED": SEED, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    # Triton's kernels, where it is installed, are tried in the test's own process and without a GPU.
    ours["TRITON_INTERPRET"] = "1"
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forkserver.py"), *modules],
        cwd=root,
        env=ours,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
