"""The scorecard: what tests measure and assert, row by row.

A test takes the fixture `scorecard` and calls, for each figure,

    scorecard(row, "metric", value, at_most=bound)      # or at_least=, or equals=

which asserts the bound, so that the table cannot show another than was asserted; a figure without a bound is there for
its reader only. `shared` is the wider bound of the ordinary suite, beside whose tests other work runs; while the
scorecard is made, nothing does.

With SCORECARD_FILE set, only tests with that fixture run, and lines of JSON tell what they measured, which of them ran
and which there are. `python -m tests.support.scorecard FILE…` turns such files into tests/SCORECARD.md. `make soak`
leaves one that the next `make scorecard` takes along: what takes long is not measured each time.
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT
from tests.support.scorecard_rows import ROWS
from tests.support.scorecard_table import Lines, Planned, Score, Session, device_line, render

FILE_ENV = "SCORECARD_FILE"
TABLE = ROOT / "tests" / "SCORECARD.md"


class Scorecard:
    """Figures of one test."""

    def __init__(self, test: str) -> None:
        self._test = test
        self.bounds = 0

    def __call__(
        self,
        row: int,
        metric: str,
        value: Any,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        equals: Any = None,
        shared: float | None = None,
    ) -> None:
        """Records, prints, and raises AssertionError where the value is out of its bound. At most one bound."""
        assert row in ROWS, f"the scorecard has no row {row}"
        given = [bound for bound in (at_most, at_least, equals) if bound is not None]
        assert len(given) <= 1 and (shared is None or (equals is None and given)), (
            "one bound, and a wider one beside it"
        )
        bound = shared if shared is not None and not os.environ.get(FILE_ENV) else given[0] if given else None
        sign = "≤" if at_most is not None else "≥" if at_least is not None else "="
        fine = bound is None or (value <= bound if sign == "≤" else value >= bound if sign == "≥" else value == bound)
        self.bounds += bound is not None
        verdict = "" if bound is None else "PASS" if fine else "FAIL"
        told = "" if bound is None else f"{sign} {_shown(bound)}"
        print(f"scorecard row {row}: {' '.join(filter(None, (f'{metric} = {_shown(value)}', verdict, told)))}")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        _append(asdict(Score(row, metric, _shown(value), told, verdict, self._test, today)))
        assert fine, f"scorecard row {row}: {metric} is {_shown(value)}, which has to be {told}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(_shown, value)) if isinstance(value, list | tuple) else str(value)


@pytest.fixture
def scorecard(request: pytest.FixtureRequest) -> Iterator[Scorecard]:
    """Records under the name of the running test, which has to assert at least one bound by it."""
    made = Scorecard(request.node.nodeid)
    failed = request.session.testsfailed
    yield made
    if request.session.testsfailed == failed:
        assert made.bounds, "a test that records has to record something that it asserts"


def note_outcome(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A test that failed keeps its figures, and the table says that it failed; one that was skipped is not run."""
    if not only_recording([item]):
        return
    if call.excinfo is None:
        if call.when == "call":
            _append({"ran": item.nodeid, "outcome": "passed"})
    elif call.excinfo.errisinstance(pytest.skip.Exception):
        _append({"ran": item.nodeid, "outcome": f"skipped: {call.excinfo.value}"})
    else:
        _append({"ran": item.nodeid, "outcome": "failed"})


def note_session(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests there are, before any is left out by `-m` or `-k`; complete unless paths were given."""
    planned = [Planned(item.nodeid, rows_of(item), item.get_closest_marker("soak") is not None) for item in items]
    complete = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    asked = " ".join(config.invocation_params.args)
    _append({"session": asdict(Session(device_line(), asked, complete, planned))})


def rows_of(item: pytest.Item) -> list[int]:
    """Rows that the test names in its own code, else those that its file names: it may record in a helper."""
    function = getattr(item, "function", None)
    for code in (function, inspect.getmodule(function)):
        if code is not None and (rows := re.findall(r"scorecard\(\s*(\d+)", inspect.getsource(code))):
            return sorted({int(row) for row in rows})
    return []


def _append(line: dict[str, object]) -> None:
    path = os.environ.get(FILE_ENV)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def only_recording(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that record something."""
    return [item for item in items if "scorecard" in getattr(item, "fixturenames", ())]


def read(paths: list[str]) -> Lines:
    """What such files say. Files may be missing."""
    lines = Lines()
    for path in (Path(path) for path in paths if Path(path).is_file()):
        for line in map(json.loads, path.read_text().splitlines()):
            if "session" in line:
                planned = [Planned(**each) for each in line["session"].pop("planned")]
                lines.sessions.append(Session(**line["session"], planned=planned))
            elif "ran" in line:
                known = lines.outcomes.get(line["ran"])
                lines.outcomes[line["ran"]] = "failed" if known == "failed" else line["outcome"]
            else:
                lines.scores.append(Score(**line))
    return lines


def main(paths: list[str]) -> int:
    """Turn the recorded lines into the table; 1 if there are none, or if a test failed."""
    lines = read(paths)
    if not lines.scores:
        print("nothing was recorded", file=sys.stderr)
        return 1
    TABLE.write_text(render(lines))
    failed = [test for test, outcome in lines.outcomes.items() if outcome == "failed"]
    print(f"{TABLE.name}: {len({score.row for score in lines.scores})} of {len(ROWS)} rows, {len(failed)} tests failed")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
