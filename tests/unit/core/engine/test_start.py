"""What the start of an engine does beside making it."""

from __future__ import annotations

import gc

from tests.support.engines import started
from tests.support.kept_server import small_engine


async def test_what_lives_as_long_as_the_process_is_not_walked_by_collections() -> None:
    """Weights and modules: a collection during a step would look at each of some hundred thousand objects."""
    gc.unfreeze()
    async with started(small_engine()):
        assert gc.get_freeze_count() > 50_000
