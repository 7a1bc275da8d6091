"""`pytest --workers 3`: one process collects, and forks three that share the files of tests between them.

The tests are imported and collected once: by pytest-xdist each worker did it anew, twenty seconds of a core each. A
worker takes a file when it has ended the one before. Tests that are marked `alone` run after all others, in one worker.

A worker that dies fails the test that it was in, and a new one goes on with what it had taken. The report of that test
has what the worker wrote to stderr in it and where its threads were. One that says nothing for longer than any test may
take is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import pytest
from _pytest import runner
from _pytest._io import TerminalWriter
from _pytest.capture import FDCapture, MultiCapture

from tests.support.fork_server import end_with

NUMBER_BYTES = 4
SECONDS_TO_END = 30.0
"""For a worker that is interrupted, to take down what its test has set up."""
SECONDS_TO_NOTICE = 5.0
"""After these it is interrupted again: an interrupt that comes while an object is taken down is lost in there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many workers, and how long one may be silent."""
    parser.addoption("--workers", type=int, default=0, help="processes that share the tests; 0 runs them in this one")
    parser.addoption("--workers-silence", type=float, default=900.0, help="seconds after which a silent one is killed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Have the workers run all tests; leaves it to pytest where none were asked for, or where a debugger was."""
    option = session.config.option
    failed = session.testsfailed and not option.continue_on_collection_errors
    if not option.workers or option.collectonly or option.usepdb or failed:
        return None
    assert threading.active_count() == 1, "a fork copies one thread"
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        # Names of files stand between the outcomes of others.
        reporter.showfspath = False
    # A collection of garbage in a worker would look at each object, and so copy each page.
    gc.collect()
    gc.freeze()
    alone = {item: item.get_closest_marker("alone") is not None for item in session.items}
    for which, count in ((False, option.workers), (True, 1)):
        Shift(session, [item for item in session.items if alone[item] is which]).run(count)
    return True


@dataclass
class Worker:
    """What the process that collected knows of one that runs tests."""

    pid: int
    messages: Connection
    stacks: IO[bytes]
    """Where its threads were when a signal ended it."""
    stderr: IO[bytes]
    """What its test has written to file descriptor 2, as long as pytest captures it."""
    taken: list[int] = field(default_factory=list)
    """Numbers of the tests that it has taken and not begun."""
    running: int | None = None
    """The test that it has begun and not ended."""
    heard: float = field(default_factory=time.monotonic)
    done: bool = False

    def last_words(self) -> str:
        """What it left in its files, which are closed."""
        said = []
        for file in (self.stderr, self.stacks):
            with file:
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        return "\n".join(said).strip()


class Shift:
    """Some tests, and the workers that share them."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self._session = session
        self._items = items
        files: dict[object, list[int]] = {}
        for number, item in enumerate(items):
            files.setdefault(item.path, []).append(number)
        self._files = list(files.values())
        self._workers: list[Worker] = []

    def run(self, count: int) -> None:
        """Until all tests have run. Raises Failed or Interrupted where pytest is to stop before."""
        # Numbers of files in a pipe: a worker that reads one has taken that file, and at the end no test is left.
        self._queue, numbers = os.pipe()
        with open(numbers, "wb") as writer:
            writer.writelines(number.to_bytes(NUMBER_BYTES) for number in range(len(self._files)))
        try:
            self._workers = [self._start([]) for _ in range(min(count, len(self._files)))]
            while self._workers:
                self._listen()
                self._stop_if_asked()
        finally:
            os.close(self._queue)
            self._end_workers()

    def _start(self, taken: list[int]) -> Worker:
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Made here: a worker may be gone before anything that it tells is read.
        stacks, stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - closed at the end
        # An interrupt that comes at once must find a worker, not a second process that has collected.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if (pid := os.fork()) == 0:
            end_with(parent)
            _become_worker(self._session, self._items, self._files, taken, self._queue, theirs, stacks, stderr)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return Worker(pid, ours, stacks, stderr, taken=list(taken))

    def _listen(self) -> None:
        silence = self._session.config.option.workers_silence
        last = min(worker.heard for worker in self._workers) + silence
        ready = wait([worker.messages for worker in self._workers], max(0.0, last - time.monotonic()))
        for worker in list(self._workers):
            if worker.messages in ready:
                worker.heard = time.monotonic()
                told = None
                with contextlib.suppress(EOFError):
                    told = worker.messages.recv()
                if told is None:
                    self._bury(worker)
                else:
                    self._hear(worker, *told)
            elif time.monotonic() - worker.heard > silence:
                # Its pipe ends with it, which is heard in the next turn.
                os.kill(worker.pid, signal.SIGKILL)
                worker.heard = time.monotonic()

    def _hear(self, worker: Worker, kind: str, told: Any) -> None:
        config = self._session.config
        if kind == "took":
            worker.taken += self._files[told]
        elif kind == "begins":
            worker.taken.remove(told)
            worker.running = told
            item = self._items[told]
            config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=told)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == "ended":
            worker.running = None
            item = self._items[told]
            config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            worker.done = True

    def _bury(self, worker: Worker) -> None:
        """Its process has ended: as it should, or in the middle of a test, which has failed then."""
        worker.messages.close()
        self._workers.remove(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.done and worker.running is None:
            worker.last_words()
            return
        how = f"a worker ended with {code} in the middle of its tests\n{worker.last_words()}"
        if worker.running is None:
            raise RuntimeError(how)
        item = self._items[worker.running]
        report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", how, "call")
        item.config.hook.pytest_runtest_logreport(report=report)
        self._workers.append(self._start(worker.taken))

    def _stop_if_asked(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _end_workers(self) -> None:
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGINT)
        again, last = (time.monotonic() + seconds for seconds in (SECONDS_TO_NOTICE, SECONDS_TO_END))
        for worker in self._workers:
            # What it says is not read any more: that it cannot say more ends it as well.
            worker.messages.close()
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > again:
                    os.kill(worker.pid, signal.SIGINT if time.monotonic() < last else signal.SIGKILL)
                    again += SECONDS_TO_NOTICE
                time.sleep(0.05)


class Teller:
    """A plugin of a worker: tells of each of its tests."""

    def __init__(self, config: pytest.Config, messages: Connection) -> None:
        self._config = config
        self._messages = messages

    def tell(self, kind: str, told: Any = None) -> None:
        """Send it to the process that collected."""
        self._messages.send((kind, told))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        self.tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


@dataclass(eq=False)
class NoTerminal:
    """What `config.get_terminal_writer()` asks for: a writer into what is captured of the test."""

    _tw: TerminalWriter = field(default_factory=lambda: TerminalWriter(sys.stderr))


def _become_worker(
    session: pytest.Session,
    items: list[pytest.Item],
    files: list[list[int]],
    taken: list[int],
    queue: int,
    messages: Connection,
    stacks: IO[bytes],
    stderr: IO[bytes],
) -> NoReturn:
    """Run tests until none is left. Ends the process, without the ends of what its parent has begun."""
    code = 1
    try:
        # A shell has what it runs in the background ignore interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        # Captured output goes to a file whose position all processes would share.
        if (capture := plugins.get_plugin("capturemanager")) is not None:
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        plugins.register(NoTerminal(), "terminalreporter")
        plugins.register(teller := Teller(session.config, messages))
        faulthandler.enable(stacks)
        captured = getattr(capture, "_global_capturing", None)
        if isinstance(captured, MultiCapture) and isinstance(captured.err, FDCapture):
            # What pytest captures goes to the file that the parent has.
            os.dup2(stderr.fileno(), captured.err.tmpfile.fileno())
        for number, after in _turns(taken, files, queue, teller):
            teller.tell("begins", number)
            # Between files nothing stays but what is of the session.
            following = session if after is None else items[after]
            items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)
            teller.tell("ended", number)
            if session.shouldfail or session.shouldstop:
                break
        runner.pytest_sessionfinish(session)
        teller.tell("done")
        code = 0
    except KeyboardInterrupt:
        with contextlib.suppress(BaseException):
            runner.pytest_sessionfinish(session)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _turns(taken: list[int], files: list[list[int]], queue: int, teller: Teller) -> Iterator[tuple[int, int | None]]:
    """The tests of a worker, each with the next one of its file."""
    while True:
        yield from zip_longest(taken, taken[1:])
        if not (read := os.read(queue, NUMBER_BYTES)):
            return
        file = int.from_bytes(read)
        teller.tell("took", file)
        taken = files[file]
