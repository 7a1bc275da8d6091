"""`python -m tests.support.fakes.serve_slowly FIFO ARGS`: the real command line, with a model that waits.

It is loaded once FIFO is written to. Until then the server listens and is not ready. The engine is scripted and
counts up, and judges by one label.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.types.labels import Activation, Labels
from service.cli.cli import main
from service.engine import builder
from tests.support.fakes.fake_engine import FakeEngine, info_with


def make_engine(gate: Path) -> FakeEngine:
    """An engine, as soon as `gate`, a FIFO, has been opened for writing and closed."""
    gate.read_bytes()
    return FakeEngine(info=info_with(labels=Labels(("relevance",), Activation.SIGMOID, relevance=0)))


if __name__ == "__main__":
    fifo = Path(sys.argv.pop(1))
    builder.build_core_engine = lambda *_: make_engine(fifo)
    main()
