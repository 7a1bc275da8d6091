"""`forkserver.py MODULE…`: an interpreter that imports the modules and then forks for each run of pytest.

So their import is paid once. A script, not a module of the package: it must import nothing of the tree, which changes
from run to run. It reads one order a line from stdin, `{"arguments": […], "log": FILE, "seconds": N}`, and answers
each with a line `{"status": N}`: the exit status of pytest, negative for a signal, or null if the run was killed after
`seconds`. The run is a session of its own; the processes of that session end with it.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Serve orders until stdin ends."""
    sys.path[0] = os.getcwd()
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _import_plugins()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"status": run(order["arguments"], order["log"], order["seconds"])}), flush=True)


def _import_plugins() -> None:
    """Pytest imports its own parts, and the plugins that are installed, when it starts: here, away from any tree."""
    import pytest

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pytest.main(["-c", os.devnull, "--noconftest", "--markers"])


def run(arguments: list[str], log: str, seconds: int) -> int | None:
    """Fork, run pytest in the child and wait for it."""
    child = os.fork()
    if child == 0:
        _become(arguments, log)
    late = False

    def kill(number: int, frame: FrameType | None) -> None:
        nonlocal late
        late = number == signal.SIGALRM
        _end_session(child)
        if number == signal.SIGTERM:
            os._exit(1)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGTERM, kill)
    signal.alarm(seconds)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    _end_session(child)
    return None if late else os.waitstatus_to_exitcode(status)


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _become(arguments: list[str], log: str) -> None:
    """Be the process that `python -m pytest` would be."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with open(log, "wb") as out, open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.argv = ["pytest", *arguments]
        import pytest

        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
