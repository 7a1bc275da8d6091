"""`python -m tests.security.serve_few_files serve ARGS`: as `tests.chaos.serve_emulated`, with few descriptors."""

from __future__ import annotations

import resource
import runpy

FILES = 128

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    runpy.run_module("tests.chaos.serve_emulated", run_name="__main__")
