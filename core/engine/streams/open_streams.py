"""Descriptions of the engine's live streams for operators: made when they are asked for, at no cost otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from core.engine.adapters.table import AdapterTable
from core.engine.streams.token_stream import TokenStream
from core.types.request import Req, RequestState
from core.types.streams import StreamInfo

STAGES = ("waiting", "preempted", "prefill", "decode")
"""States of a live request, in the order of its progress."""
ENDED = "ended"
WAITING, PREEMPTED, PREFILL, DECODE = range(len(STAGES))


class LiveStreams:
    """The `OpenStreams` of `core.engine.api`, over the engine's own table of streams by id. Event-loop thread only."""

    def __init__(self, live: Mapping[str, TokenStream], adapters: AdapterTable) -> None:
        self._live, self._adapters = live, adapters
        self._on_end: Callable[[StreamInfo], None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def oldest(self, count: int) -> tuple[StreamInfo, ...]:
        """At most `count` streams, oldest first."""
        return tuple(self._info(stream) for stream in islice(self._live.values(), count))

    def on_end(self, told: Callable[[StreamInfo], None]) -> None:
        """Call `told` with each stream when its last sequence has ended. There is one listener; it must be quick."""
        self._on_end = told

    def ended(self, stream: TokenStream) -> None:
        """Tell the listener of `stream`, all of whose sequences have ended. They must still be attached to it."""
        if self._on_end is not None:
            began = any(req.scheduled_at is not None for req in stream.reqs)
            self._on_end(self._info(stream)._replace(state=ENDED if began else STAGES[WAITING]))

    def _info(self, stream: TokenStream) -> StreamInfo:
        reqs, outputs = stream.reqs, stream.outputs
        first, tokens = reqs[0], outputs[0].total
        prompt = first.input_len
        for output in outputs[1:]:
            tokens += output.total
        # The outputs of one prompt share it; the inputs of an embedding are prompts of their own.
        if first.pooling is not None:
            prompt = sum(req.input_len for req in reqs)
        slot = first.adapter_slot
        adapter = self._adapters.name(slot) if slot else ""
        return StreamInfo(stream.request_id, stage(reqs), prompt, tokens, first.arrived_at, adapter)


def stage(reqs: Sequence[Req]) -> str:
    """The state of a request with the sequences `reqs`: that of the sequence which got furthest."""
    furthest = 0
    for req in reqs:
        if req.state is RequestState.RUNNING:
            furthest = max(furthest, PREFILL if req.first_token_at is None else DECODE)
        elif req.retractions:
            furthest = max(furthest, PREEMPTED)
    return STAGES[furthest]
