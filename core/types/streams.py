"""A description of live streams for operators: plain data, without the content of requests and outputs."""

from __future__ import annotations

from typing import NamedTuple


class StreamInfo(NamedTuple):
    """One request that has not ended, all its outputs (or the inputs of an embedding) together.

    A tuple, because the event loop makes hundreds of them in one go.
    """

    request_id: str
    """The id under which the engine knows the request."""
    state: str
    """How far it got: `waiting`, `prefill`, `decode`, or `preempted` while it waits for its pages again.

    For a request that has ended: `ended`, or `waiting` if it never left the queue.
    """
    prompt_tokens: int
    output_tokens: int
    arrived_at: float
    """In `time.monotonic` seconds."""
    adapter: str
    """Name of its LoRA adapter; empty for none."""
