"""A run that skips more than is listed fails, and says for which reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.skips import FILE, listed, too_many

TESTS = "import pytest\n\n\n@pytest.mark.skipif(True, reason={reason!r})\ndef test_a(): ...\n\n\ndef test_b(): ...\n"


def test_more_than_is_listed_is_told_by_reason() -> None:
    known = listed("2 no device\n1 no tool at all\n")
    assert known == {"no device": 2, "no tool at all": 1}
    assert too_many(Counter({"no device": 2}), known) == []
    found = Counter({"no device": 3, "no tool at all": 1, "tired": 1})
    assert [line.partition(" listed")[0] for line in too_many(found, known)] == ["3 skipped, 2", "1 skipped, 0"]


def test_the_list_has_each_reason_once() -> None:
    lines = FILE.read_text().splitlines()
    assert len(listed(FILE.read_text())) == len(lines) and all(int(line.split()[0]) > 0 for line in lines)


def test_such_a_run_fails(tmp_path: Path) -> None:
    def run(reason: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(TESTS.format(reason=reason))
        script = (
            "import sys, pytest\nfrom tests.support.skips import SkipWatch\n"
            f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir', {str(tmp_path)!r}, '-c', '/dev/null', "
            f"{str(tmp_path / 'test_it.py')!r}], plugins=[SkipWatch()]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        return done.returncode, done.stdout

    code, told = run("no longer runs anywhere")
    assert code == 1 and "1 skipped, 0 listed in tests/skips.txt: no longer runs anywhere" in told
    assert run("needs a CUDA device")[0] == 0
