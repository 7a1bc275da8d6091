"""Compiles a library and loads it for the first time, in a process of its own: what a compiler made may kill it.

Run as a module by `core.native.library`, with the library's `at` and the path to make it at. It leads a session, in
which the compiler's own processes are, and ends them and itself when its input ends: the server that wanted the library
is gone. Exit code 0 means that the library was made and could be loaded; otherwise the last line of its output says
why not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from core.native.kept_library import ExtensionUnavailable
from core.native.library import Library, library_at


def main() -> None:
    """The process."""
    threading.Thread(target=_end_with_server, daemon=True).start()
    library, made = library_at(sys.argv[1]), Path(sys.argv[2])
    try:
        _compile(library, made)
        library.load_from(made)
    except ExtensionUnavailable as reason:
        print(reason, flush=True)
        sys.exit(1)
    # Nothing of the libraries that were loaded has a say in how this ends.
    os._exit(0)


def _compile(library: Library, made: Path) -> None:
    command = library.compile_command(made)
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
