"""The table that is made of what the scorecard's tests recorded, and what it says of those that did not run."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.scorecard_rows import ROWS, UNCOVERED


@dataclass(frozen=True)
class Score:
    """One measured value. `bound` and `verdict` are empty where none was asserted."""

    row: int
    metric: str
    value: str
    bound: str
    verdict: str
    test: str
    date: str


@dataclass(frozen=True)
class Planned:
    """A test that records: the rows that its code names, and whether only `make soak` runs it."""

    test: str
    rows: list[int]
    soak: bool


@dataclass(frozen=True)
class Session:
    """One run of pytest. `complete`: its `planned` are all that there are, for it was given no paths."""

    device: str
    asked: str
    complete: bool
    planned: list[Planned]


@dataclass
class Lines:
    """All that was recorded."""

    scores: list[Score] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)

    def tests(self, row: int) -> set[str]:
        """Tests that recorded into the row, or whose code names it."""
        named = {each.test for session in self.sessions for each in session.planned if row in each.rows}
        return named | {score.test for score in self.scores if score.row == row}

    def missing(self) -> dict[str, str]:
        """By test that is there and did not run to its end, why."""
        every = {each.test: each for session in self.sessions for each in session.planned}
        found = {}
        for test, planned in sorted(every.items()):
            outcome = self.outcomes.get(test, "`make soak` runs it" if planned.soak else "was left out")
            if outcome not in ("passed", "failed"):
                found[test] = outcome
        return found


def device_line() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {gpu}, Python {platform.python_version()}, PyTorch {torch.__version__}"


def render(lines: Lines) -> str:
    """The whole file."""
    parts = [
        "# Reliability scorecard",
        "Made by `make scorecard`, which runs every test that records a row, and takes over what the last `make soak`\n"
        "in the same directory recorded; do not edit. A bound is what the test asserted.",
        *(f"Measured on: {device}." for device in dict.fromkeys(session.device for session in lines.sessions)),
        *_partial(lines),
        _table(("row", "what", "expected", "verdict"), [(str(row), *ROWS[row], verdict(row, lines)) for row in ROWS]),
        "## Figures",
        _table(
            ("row", "measured", "value", "bound", "verdict", "test", "date"),
            [
                (str(s.row), s.metric, s.value, s.bound or "none", s.verdict, f"`{_short(s.test)}`", s.date)
                for s in sorted(lines.scores, key=lambda s: (s.row, s.test))
            ],
        ),
    ]
    failed = sorted(test for test, outcome in lines.outcomes.items() if outcome == "failed")
    if failed:
        parts += ["## Failed in this run", "\n".join(f"- `{_short(test)}`" for test in failed)]
    if missing := lines.missing():
        parts += ["## Not run", "\n".join(f"- `{_short(test)}`: {why}" for test, why in missing.items())]
    return "\n\n".join(parts) + "\n"


def verdict(row: int, lines: Lines) -> str:
    """PASS or FAIL by the bounds and the tests of the row, and how many of them ran; or why it has none."""
    if row in UNCOVERED:
        return f"no test: {UNCOVERED[row]}"
    tests, missing = lines.tests(row), lines.missing()
    verdicts = {score.verdict for score in lines.scores if score.row == row}
    if "FAIL" in verdicts or any(lines.outcomes.get(test) == "failed" for test in tests):
        return "**FAIL**"
    ran = len(tests - missing.keys())
    word = "PASS" if "PASS" in verdicts else "**not run**"
    return word if ran == len(tests) and tests else f"{word}, {ran} of {len(tests)} tests"


def _partial(lines: Lines) -> list[str]:
    """A warning unless some run looked for all tests there are, and ran all but the long ones."""
    if not any(session.complete for session in lines.sessions):
        asked = "; ".join(f"`pytest {session.asked}`" for session in lines.sessions)
        return [f"**Partial**: made of {asked or 'lines without a session'}, which looked for some of the tests only."]
    left = [test for test, why in lines.missing().items() if why == "was left out"]
    return [f"**Partial**: {len(left)} tests were left out; they are listed at the end."] if left else []


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _short(test: str) -> str:
    return test.removeprefix("tests/")
