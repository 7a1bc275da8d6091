"""Threads make compiled objects at once: engines of one process pack their models on threads of their own.

pybind11 has one table of all instances, torch's among them, and the interpreter's lock guards it. An object that
was entered without the lock ends the process when it, or one that another thread made, is let go of.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.models.native.extension import DECODER
from core.models.products.extension import PRODUCTS
from core.native.kept_library import ExtensionUnavailable
from core.native.library import Library
from tests.support.repository import ROOT

PROGRAM = """
import sys, threading, torch
from core.native.library import library_at
sys.setswitchinterval(1e-6)
compiled, matrix = library_at(sys.argv[1]).load(), torch.ones(8, 8)
experts, dense, norm = matrix[None], (matrix, None, None, None), (torch.ones(8), None, 1e-5, False, 8)
crew = compiled.Crew(1, False) if hasattr(compiled, "Crew") else None
together, made = threading.Barrier(2), []
def work():
    together.wait()
    # They are kept, so that the table grows: that takes long enough for another thread to come in between.
    for _ in range(4):
        kept = [{made} for _ in range(5000)]
    made.extend(kept)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(made), flush=True)
made.clear()
"""
PRODUCT = "compiled.Product(crew, False, matrix, None, None)"
MAKERS = [
    pytest.param(PRODUCTS, PRODUCT, id="Product", marks=pytest.mark.nightly),
    pytest.param(PRODUCTS, "compiled.Experts(crew, experts, None, False)", id="Experts"),
    pytest.param(DECODER, "compiled.Decoder(1, 1, 8, 1, False, matrix, norm, dense, (1.0, 1.0, 0.0))", id="Decoder"),
]


@pytest.mark.parametrize(("library", "made"), MAKERS)
def test_threads_may_make_them_at_once(library: Library, made: str) -> None:
    try:
        library.load()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-c", PROGRAM.replace("{made}", made), library.at]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["10000"]), done.stderr
