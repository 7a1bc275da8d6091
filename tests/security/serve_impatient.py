"""`python -m tests.security.serve_impatient serve ARGS`: as `serve_emulated`, with little time for messages."""

from __future__ import annotations

import runpy

from service.limits.request_reads import CALLS

SECONDS = 2.0

if __name__ == "__main__":
    CALLS.seconds = SECONDS
    runpy.run_module("tests.chaos.serve_emulated", run_name="__main__")
