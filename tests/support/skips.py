"""The skips that are known, by reason: `skips.txt` has a line with a number and a reason each.

With `--listed-skips`, which `.ci/run` gives, a run fails that skips more often for a reason than is listed there: tests
that no longer run anywhere look like tests that pass.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.repository import ROOT

FILE = ROOT / "tests" / "skips.txt"


def listed(text: str) -> Counter[str]:
    """How often each reason may be given."""
    lines = (line.split(maxsplit=1) for line in text.splitlines())
    return Counter({reason: int(number) for number, reason in lines})


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why this test or file was skipped; None if it was not."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return None
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def too_many(found: Counter[str], known: Counter[str]) -> list[str]:
    """A line for each reason that was given more often than is listed."""
    return [
        f"{found[reason]} skipped, {known[reason]} listed in tests/skips.txt: {reason}"
        for reason in sorted(found - known)
    ]


class SkipWatch:
    """Counts the skips of a run, and fails it at its end for those that are too many."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Count one."""
        if (reason := reason_of(report)) is not None:
            self.found[reason] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a whole file that skips itself."""
        self.pytest_runtest_logreport(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would have passed."""
        if too_many(self.found, listed(FILE.read_text())) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which."""
        for line in too_many(self.found, listed(FILE.read_text())):
            terminalreporter.write_line(f"FAILED {line}", red=True)
