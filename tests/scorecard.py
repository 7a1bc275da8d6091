"""The scorecard: what tests measure, row by row, and the table that is made of it.

A test takes the fixture `scorecard` and calls `scorecard(row, "metric", value)`. With SCORECARD_FILE set, only tests
with that fixture run and each value becomes a line of JSON in that file, and so does each failure of such a test;
`python -m tests.scorecard FILE…` turns such files into tests/SCORECARD.md. `make soak` leaves one that the next
`make scorecard` takes along: what takes long is not measured each time.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.scorecard_rows import ROWS, UNCOVERED

FILE_ENV = "SCORECARD_FILE"
TABLE = Path(__file__).with_name("SCORECARD.md")

Scorecard = Callable[[int, str, object], None]


@dataclass(frozen=True)
class Score:
    """One measured value."""

    row: int
    metric: str
    value: str
    test: str
    date: str


@pytest.fixture
def scorecard(request: pytest.FixtureRequest) -> Scorecard:
    """Records one value for one row under the name of the running test; also prints it."""
    test = request.node.nodeid

    def record(row: int, metric: str, value: object) -> None:
        assert row in ROWS, f"the scorecard has no row {row}"
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        print(f"scorecard row {row}: {metric} = {shown}")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        _append(asdict(Score(row, metric, shown, test, today)))

    return record


def note_failure(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A test that failed keeps its figures, and the table says that it failed."""
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception) and only_recording([item]):
        _append({"failed": item.nodeid})


def _append(line: dict[str, object]) -> None:
    path = os.environ.get(FILE_ENV)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def only_recording(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that record something."""
    return [item for item in items if "scorecard" in getattr(item, "fixturenames", ())]


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


def render(scores: list[Score], device: str, failed: frozenset[str] = frozenset()) -> str:
    """The whole file."""
    by_row: dict[int, list[Score]] = {}
    for score in scores:
        by_row.setdefault(score.row, []).append(score)
    lines = [
        "# Reliability scorecard",
        "",
        "Made by `make scorecard`, which runs every test that records a row, and takes over what the last `make soak`",
        "in the same directory recorded; do not edit.",
        "",
        f"Measured on: {device}.",
        "",
        "| row | what | expected | measured | test | date |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(by_row):
        lines += _row(row, by_row[row], failed)
    lines += ["", "## Rows without a figure", "", "| row | what | why |", "|---|---|---|"]
    for row, (what, _) in ROWS.items():
        if row not in by_row:
            lines.append(f"| {row} | {what} | {UNCOVERED.get(row, 'no test recorded it in this run')} |")
    if failed:
        lines += ["", "## Failed in this run", "", *(f"- `{test.removeprefix('tests/')}`" for test in sorted(failed))]
    return "\n".join(lines) + "\n"


def _row(row: int, scores: list[Score], failed: frozenset[str]) -> list[str]:
    """The lines of one row, one per test."""
    what, expected = ROWS[row]
    tests: dict[str, list[Score]] = {}
    for score in scores:
        tests.setdefault(score.test, []).append(score)
    lines = []
    for test, found in sorted(tests.items()):
        values = "**failed** " * (test in failed) + "; ".join(f"{score.metric}: {score.value}" for score in found)
        cells = (str(row), what, expected, values, f"`{test.removeprefix('tests/')}`", found[-1].date)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        what = expected = ""
    return lines


def main(paths: list[str]) -> int:
    """Turn the recorded lines into the table; 1 if there are none, or if a test failed. Files may be missing."""
    found = [path for path in map(Path, paths) if path.is_file()]
    lines = [json.loads(line) for path in found for line in path.read_text().splitlines()]
    failed = frozenset(line["failed"] for line in lines if "failed" in line)
    scores = [Score(**line) for line in lines if "failed" not in line]
    if not scores:
        print("nothing was recorded", file=sys.stderr)
        return 1
    TABLE.write_text(render(scores, device_line(), failed))
    print(f"{TABLE.name}: {len({score.row for score in scores})} of {len(ROWS)} rows, {len(failed)} tests failed")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
