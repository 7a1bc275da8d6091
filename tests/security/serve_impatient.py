"""`python -m tests.security.serve_impatient serve ARGS`: as `serve_emulated`, with little time for messages, and with
one arena of memory. With one for each of gRPC's threads, what is held depends on which threads read which messages: 116
to 184 MB in equal runs, beside 90 to 108 with one."""

from __future__ import annotations

import ctypes
import runpy

from service.limits.request_reads import CALLS

SECONDS = 2.0
M_ARENA_MAX = -8

if __name__ == "__main__":
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1), "the C library has no such setting"
    CALLS.seconds = SECONDS
    runpy.run_module("tests.chaos.serve_emulated", run_name="__main__")
