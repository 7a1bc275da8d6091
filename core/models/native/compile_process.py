"""Compiles the decoder and loads it for the first time, in a process of its own: what a compiler made may kill it.

Run as a module by `core.models.native.extension`, with the library's path; leads a session, in which the compiler's own
processes are. It ends them, and itself, when its input ends: the server that wanted the library is gone. Exit code 0
means that the library was made and could be loaded; otherwise the last line of its output says why not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from core.models.native.extension import compile_command, load_library
from core.models.native.kept_library import ExtensionUnavailable


def main() -> None:
    """The process."""
    threading.Thread(target=_end_with_server, daemon=True).start()
    made = Path(sys.argv[1])
    try:
        _compile(made)
        load_library(made)
    except ExtensionUnavailable as reason:
        print(reason, flush=True)
        sys.exit(1)
    # Nothing of the libraries that were loaded has a say in how this ends.
    os._exit(0)


def _compile(made: Path) -> None:
    command = compile_command(made)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
        raise ExtensionUnavailable(f"{command[0]} failed: {first.strip()}")


def _end_with_server() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
