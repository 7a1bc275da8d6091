"""A pytest plugin that writes down how the first failing test failed, or that all passed.

`-p tests.proofs.mutants.witness --witness FILE` leaves one JSON object in FILE:

- `how`: `passed`, `skipped` (no test ran to its end), `assertion`, `invariant`, `timeout` or `error`;
- `test`: the node id; `where`: `path:line` of the failing statement, relative to the root; `text`: what it said.

`assertion` is an AssertionError, or `pytest.fail`, that code below `tests/` raised in the test's call phase: its own
failure to see what it expects. An assert of the product, an exception, and any failure of a fixture are `error`.
`invariant` is the product's `InvariantViolation`, `timeout` a bound on time that passed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

TEXT_LENGTH = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--witness", metavar="FILE", help="write how the first failing test failed")


def pytest_configure(config: pytest.Config) -> None:
    """Watches only when asked to."""
    if path := config.getoption("--witness"):
        config.pluginmanager.register(Witness(Path(path), config.rootpath))


class Witness:
    """Sees the first failure and no later one."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._passed = 0
        self._told = False

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Writes at once: after a failure the process may hang."""
        if call.excinfo is None:
            self._passed += call.when == "call"
        elif not call.excinfo.errisinstance(pytest.skip.Exception):
            how, where, text = self._cause(call.excinfo.value)
            if call.when != "call" and how != "timeout":
                how, text = "error", f"{call.when}: {text}"
            self._tell(how, item.nodeid, where, text)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has no test that could assert."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            self._tell("error", report.nodeid, report.nodeid, f"collect: {lines[-1].removeprefix('E').strip()}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Nothing failed, or there was no such test."""
        how = "error" if exitstatus not in (0, 5) else "passed" if self._passed else "skipped"
        self._tell(how, "", "", f"{self._passed} passed, exit status {int(exitstatus)}")

    def _tell(self, how: str, test: str, where: str, text: str) -> None:
        if not self._told:
            self._told = True
            text = " ".join(text.split())[:TEXT_LENGTH]
            self._path.write_text(json.dumps({"how": how, "test": test, "where": where, "text": text}))

    def _cause(self, error: BaseException) -> tuple[str, str, str]:
        """Of all exceptions of a group, the one that tells most."""
        causes = [self._one(each) for each in _leaves(error)]
        ranks = ("assertion", "invariant", "timeout", "error")
        return min(causes, key=lambda cause: ranks.index(cause[0]))

    def _one(self, error: BaseException) -> tuple[str, str, str]:
        """How, where and what of one exception."""
        frames = [(path, line) for path, line in _frames(error.__traceback__) if self._inside(path)]
        path, line = frames[-1] if frames else (self._root, 0)
        name = path.relative_to(self._root).as_posix()
        said = f"{type(error).__name__}: {error}"
        where = f"{name}:{line}"
        if isinstance(error, pytest.fail.Exception) and said.startswith("Failed: Timeout (>"):
            return "timeout", where, said
        if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
            return "timeout", where, said
        if any(each.__name__ == "InvariantViolation" for each in type(error).__mro__):
            return "invariant", where, said
        if isinstance(error, AssertionError | pytest.fail.Exception) and name.startswith("tests/"):
            return "assertion", where, _sentence(_statement(path, line), said.removeprefix("AssertionError: "))
        return "error", where, said

    def _inside(self, path: Path) -> bool:
        return path.is_relative_to(self._root) and "site-packages" not in path.parts


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _frames(traceback: TracebackType | None) -> Iterator[tuple[Path, int]]:
    while traceback is not None:
        yield Path(traceback.tb_frame.f_code.co_filename).resolve(), traceback.tb_lineno
        traceback = traceback.tb_next


def _sentence(statement: str, said: str) -> str:
    """The statement, and the first thing said that is not a part of it."""
    news = [line for line in said.splitlines() if line.strip() not in statement]
    return "  # ".join([statement, *news[:1]])


def _statement(path: Path, line: int) -> str:
    """The source from `line` to the end of its statement, as far as its brackets tell."""
    found: list[str] = []
    for text in path.read_text().splitlines()[line - 1 : line + 9]:
        found.append(text.strip())
        joined = " ".join(found)
        if all(joined.count(opened) <= joined.count(closed) for opened, closed in ("()", "[]", "{}")):
            break
    return " ".join(found)
