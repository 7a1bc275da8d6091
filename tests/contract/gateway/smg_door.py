"""The real gateway between the clients and a fleet, as `tests.support.fakes.fleet.FrontDoor`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.smg import Smg
from tests.support.fakes.fleet import Refused, Serving

FLEET_FLAGS: dict[str, Any] = {
    "health_check_interval_secs": 1,
    "health_failure_threshold": 1,
    "retry_max_retries": 5,
    "retry_initial_backoff_ms": 50,
}
"""As `docs/how-to/rollouts.md` says; the retries are the gateway's defaults. By its other defaults it would notice that
a worker drains after three minutes."""


needs_openai = pytest.mark.skipif(find_spec("openai") is None, reason="pip install openai for its client")


class SmgDoor:
    """OpenAI's own client, which is told not to repeat anything, and one gateway with `flags` to all workers."""

    # Twice the interval of its health checks, or its two successes in a row, and some.
    linger, min_ready = 3.0, 4.0

    def __init__(self, workers: Sequence[Serving], folder: Path, **flags: Any) -> None:
        import openai

        self._workers = len(workers)
        self.smg = Smg(folder, *(each.target for each in workers), **(FLEET_FLAGS | flags))
        self._failed = openai.APIError
        self._client = openai.AsyncOpenAI(base_url=self.smg.url, api_key="none", max_retries=0)
        self._model = ""

    async def settle(self) -> None:
        """See `FrontDoor`."""
        await asyncio.to_thread(self.smg.wait_ready, self._workers)
        self._model = self._model or (await self._client.models.list()).data[0].id

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[int]:
        """See `FrontDoor`. How many tokens came is what the last event says."""
        came = 0
        try:
            events = await self._client.completions.create(
                model=self._model,
                prompt=prompt,
                max_tokens=tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for event in events:
                new = event.usage.completion_tokens - came if event.usage else int(not came)
                came += new
                yield new
        except self._failed as failed:
            raise Refused(f"{getattr(failed, 'status_code', '') or type(failed).__name__}: {failed}"[:200]) from None

    async def close(self) -> None:
        """See `FrontDoor`."""
        await self._client.close()
        self.smg.close()
