"""Decode steps as captured graphs: one per batch size, from the FutureMap's tokens to logits, padded with row 0.

A replay computes what `ForwardBatch` and `Model.forward` would: it gathers the newest tokens, writes their KV, attends,
and leaves logits in one fixed place. Table writes come before it, sampling and relay after it, as in a step without
graphs. So every sampling option, grammar and log probability works with a replay. The idea of one graph per padded
batch size is from vLLM and SGLang; that padding must be zeroed each time is SGLang #26292.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode, ScheduleBatch
from core.device.graphs import Graph, GraphMaker
from core.device.staging import Staging
from core.device.static_block import StaticBlock
from core.executor.capture import NO_LENGTHS, CaptureProgress, captured, padded, record
from core.executor.device_state import DeviceState
from core.memory.companion import Captured, Hooking
from core.models.base import ModelSpec, hooks_layers
from core.relay.resolve import DecodeRows
from core.speculation.grid import Grid
from core.types.arrays import Ints

logger = logging.getLogger(__name__)

FINE, COARSE, COARSE_FROM, LARGEST = 8, 64, 256, 1024
"""Sizes are multiples of FINE up to COARSE_FROM and of COARSE above; larger batches than LARGEST are not captured."""

SECTIONS = 3
"""Inputs with one entry per row: rows, and the least and the most of their lengths before the step."""


CARRIED: Final = 24
"""Words of 8 bytes by row that others may send with these: 12 of sampling, up to 5 of a state, 4 of a window."""
LISTED: Final = 1 << 12
"""Words beside these for what rows have any number of: biases, and texts whose tokens are penalised. Where they are
more, one more copy is made on the device."""


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last is `max_rows`, or LARGEST if that is smaller."""
    most = min(max_rows, LARGEST)
    sizes = {1, 2, 4, *range(FINE, COARSE_FROM + 1, FINE), *range(COARSE_FROM, LARGEST + 1, COARSE), most}
    return tuple(sorted(size for size in sizes if size <= most))


def why_not(spec: ModelSpec, attention: AttentionBackend | None) -> str | None:
    """Why decode steps of a model cannot be captured, as the end of a sentence; None if they can."""
    if attention is None or not attention.graph_safe:
        return "the attention backend plans on the host"
    return None if spec.capturable else "the model does not promise to leave host lengths alone"


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One step's inputs in static memory, without padding. The next step's transfer overwrites them."""

    size: int
    """Rows with padding: the size of the graph to replay."""
    rows: torch.Tensor
    """int64[B]."""
    seq_lens: torch.Tensor
    """int64[B]: lengths after the step, in tokens; written by the replay."""
    fresh: torch.Tensor
    """int64[F]: rows with a new owner."""
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """int64[n] each: rows, places, pages of `TableWrites`."""
    trial: Grid | None = None
    """What is verified, written by the replay; None without drafts."""
    chunks: int = 0
    """Places for tokens of prompt chunks, with padding, which its graph has beside those rows."""
    sampled: tuple[torch.Tensor, torch.Tensor] | None = None
    """(row, and tokens before, which the replay writes) of each row that samples, int64[S] each; None for all rows."""
    staging: Staging | None = None
    """Finds what came with the inputs."""
    hooked: bool = False
    """Whether layers compute what a `Hooking` adds."""


class DecodeGraphs:
    """Graphs by batch size over the device state of one engine. Forward stream only.

    Capture and replay read addresses, never host values: the sections at the beginning of `block`, the table, the
    pools, the FutureMap and its counters, the weights. Where a row stands is read in the replay, as in a step without
    graphs. Outputs: `seq_lens` int64[largest], lengths after the step, and `logits` float32[largest, V], written last.
    """

    def __init__(self, state: DeviceState, sizes: Sequence[int], maker: GraphMaker) -> None:
        self._state = state
        self.maker = maker
        self._sizes = tuple(sorted(sizes))
        largest, device = self._sizes[-1], state.streams.device
        # Room for the sections, and beside them for every row fresh and with one new page.
        self.block = StaticBlock(largest * (SECTIONS + 1 + 3 + CARRIED) + LISTED, state.staging)
        self.logits = torch.zeros(largest, state.model.spec.vocab_size, dtype=torch.float32, device=device)
        self.seq_lens = torch.zeros(largest, dtype=torch.int64, device=device)
        # Each row has one token, so place i holds the last token of row i.
        self._last = torch.arange(largest, device=device)
        self._companions = tuple(each for each in state.companions.values() if isinstance(each, Captured))
        self._hooks = _hooking(state, largest)
        self._graphs: dict[int, Graph] = {}
        self._hooked: dict[int, Graph] = {}
        """The same with what `_hooks` adds: steps that ask for none keep the cheaper graphs."""
        self.replays = 0
        """Number of steps replayed so far."""

    @torch.inference_mode()
    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Record all sizes. Raises RuntimeError when the model waits for the device in its forward pass."""
        self._graphs = record(self._state, self.maker, self._sizes[::-1], self._work, progress)
        self._capture_hooked()

    def _capture_hooked(self) -> None:
        if self._hooks is None:
            return
        try:
            with self._state.streams.on_forward():
                for size in reversed(self._sizes):
                    with self._hooks.recording(size):
                        self._hooked[size] = self.maker.capture(self._work(size))
            self._state.streams.synchronize()
        except Exception as error:
            # Whatever it is: Triton's errors, of a kernel that does not fit the device, are no RuntimeErrors.
            self._hooks = None
            self._hooked.clear()
            logger.warning("decode steps with adapters are not captured: %s", str(error).partition("\n")[0])

    def takes(self, batch: ScheduleBatch) -> bool:
        """Whether `batch` can be replayed: decode rows only, at most as many as the largest graph, known adapters."""
        fits = len(batch.rows) <= self._sizes[-1] and self._length(batch) <= self.block.memory.numel()
        if batch.mode is not ForwardMode.DECODE or not fits:
            return False
        if not hooks_layers(batch.companion_writes):
            return True
        return self._hooks is not None and self._hooks.recorded(batch.companion_writes)

    def load(self, batch: ScheduleBatch, carried: Sequence[np.ndarray] = ()) -> DecodeInputs:
        """Copy the inputs of `batch`, which `takes` accepted, to the device in one transfer, with fresh padding.

        `carried`: what else goes with them.
        """
        size, count = self._size(len(batch.rows)), len(batch.rows)
        writes = batch.table_writes
        sections = sections_of(batch.rows, batch.lower_lens, batch.prefix_lens, size)
        beside = (batch.fresh_rows, writes.rows, writes.places, writes.pages)
        views, parcel = self.block.carry([*sections, *beside], carried)
        fresh, *table = views[len(sections) :]
        assert len(views[0]) == count
        hooked, written = hooks_layers(batch.companion_writes), (table[0], table[1], table[2])
        return DecodeInputs(size, views[0], self.seq_lens[:count], fresh, written, staging=parcel, hooked=hooked)

    def replay(self, inputs: DecodeInputs) -> torch.Tensor:
        """float32[B, V]: logits of the real rows, a view that the next replay overwrites.

        The caller has called `load` and applied the step's table writes.
        """
        (self._hooked if inputs.hooked else self._graphs)[inputs.size].replay()
        self.replays += 1
        return self.logits[: len(inputs.rows)]

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _length(self, batch: ScheduleBatch) -> int:
        return SECTIONS * self._size(len(batch.rows)) + len(batch.fresh_rows) + 3 * len(batch.table_writes.rows)

    def _work(self, size: int) -> Callable[[], None]:
        self.block.fill(sections_of(NO_LENGTHS, NO_LENGTHS, NO_LENGTHS, size))
        state = self._state
        rows, lower, upper = self.block.memory[: SECTIONS * size].split(size)
        logits, lens, last = self.logits[:size], self.seq_lens[:size], self._last[:size]

        def work() -> None:
            entered = DecodeRows(rows, lower, upper).enter(state.future_map, lens)
            for companion in self._companions:
                companion.look_up(rows)
            slots = state.pool.slots(rows, entered.lens) if entered.slots is None else entered.slots
            batch = ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=entered.ids,
                positions=entered.lens,
                rows=rows,
                seq_lens=lens,
                out_cache_loc=slots,
                last_indices=last,
                req_to_token=state.pool.table,
                kv_pool=state.kv_pool,
                num_extend=0,
                prefix_lens_host=NO_LENGTHS,
                extend_lens_host=NO_LENGTHS,
            )
            logits.copy_(state.model.forward(batch))

        return work


def capture_decode_graphs(
    state: DeviceState, sizes: Sequence[int], attention: AttentionBackend | None
) -> DecodeGraphs | None:
    """Graphs for `sizes`, or None where the device has no graphs or the model cannot be captured; the log says why."""
    maker = state.streams.new_graphs() if sizes else None
    if maker is None:
        return None
    reason = _why_no_steps(state) or why_not(state.model.spec, attention)
    if reason is not None:
        logger.info("decode steps are not captured: %s", reason)
        return None
    graphs = DecodeGraphs(state, sizes, maker)
    return graphs if captured("decode steps", f"decode steps of up to {sizes[-1]} rows", graphs.capture) else None


def _why_no_steps(state: DeviceState) -> str | None:
    """Why the steps of an engine cannot be captured, whatever its model is."""
    if state.streams.recorder:
        return "a recorder looks at the steps"
    measured = state.verification is not None and state.model.spec.state_layers
    return "which states a step with drafts keeps is measured on the host" if measured else None


def _hooking(state: DeviceState, rows: int) -> Hooking | None:
    """What steps of up to `rows` rows can be captured with; None, and a line in the log, where there is none."""
    found = next((each for each in state.companions.values() if isinstance(each, Hooking)), None)
    if found is None:
        return None
    # What it fills is read by the very first runs, on the stream of all steps.
    with state.streams.on_forward():
        reason = found.prepare(rows, state.staging)
    if reason is not None:
        logger.info("decode steps with adapters are not captured: %s", reason)
    return found if reason is None else None


class Replays(Protocol):
    """Graphs of one kind of step."""

    def takes(self, batch: ScheduleBatch) -> bool:
        """Whether `batch` can be replayed."""
        ...

    def load(self, batch: ScheduleBatch, carried: Sequence[np.ndarray] = ()) -> DecodeInputs:
        """Copy the inputs of `batch` to the device, and `carried` with them."""
        ...

    def replay(self, inputs: DecodeInputs) -> torch.Tensor:
        """The logits of the step with these inputs."""
        ...


def sections_of(rows: Ints, lower: Ints, upper: Ints, size: int) -> list[Ints]:
    """Each input followed by its padding: padded rows are row 0 at position 0, and write KV slot 0 (law 6)."""
    return [part for values in (rows, lower, upper) for part in padded(values, size)]
