"""`python -m tests.support.fakes.serve_fake ARGS`: the real command line with a scripted engine in the model's place.

A prompt "hold" is answered with one token and then nothing; "die" kills the engine; all else counts up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from core.types.io import GenerateRequest
from service.cli.cli import main
from service.engine import builder
from tests.support.fakes.fake_engine import FakeEngine, Step, count_up, held


def make_engine(*_: object) -> FakeEngine:
    """An engine whose behaviour the prompt chooses."""
    engine = FakeEngine()

    def script(request: GenerateRequest) -> Iterator[Step]:
        if request.text == "die":
            asyncio.get_running_loop().call_soon(engine.kill, RuntimeError("device lost"))
        if request.text in ("hold", "die"):
            yield from held(asyncio.Event())(request)
        yield from count_up(request)

    engine.script = script
    return engine


if __name__ == "__main__":
    builder.build_core_engine = make_engine
    main()
