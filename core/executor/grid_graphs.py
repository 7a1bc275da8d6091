"""Steps that verify drafts as captured graphs: one for each number of rows and width of the grid, padded with row 0.

They are to a grid what `decode_graphs` are to a step of one token a row, and share memory with these: from the
FutureMap's tokens and the guesses that came with the step to the logits of all places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from core.batch.schedule_batch import ScheduleBatch
from core.device.graphs import Graph, GraphMaker
from core.device.static_block import StaticBlock
from core.executor.capture import NO_LENGTHS, CaptureProgress, captured, record
from core.executor.decode_graphs import CARRIED, LISTED, DecodeGraphs, DecodeInputs, sections_of
from core.executor.device_state import DeviceState
from core.executor.grid_speculator import GridSpeculator, grid_batch, grid_of
from core.executor.verification import Attempt, Verification
from core.models.base import hooks_layers
from core.relay.resolve import DecodeRows
from core.speculation.grid import Grid
from core.speculation.guesses import Guesses
from core.types.arrays import Ints

MOST_PLACES: Final = 256
"""Grids of more places are not captured: their logits take memory (128 MiB with 128 Ki ids), and they compute for long
enough to be launched one kernel at a time."""

SECTIONS: Final = 7
"""Inputs with one entry per row; beside them the guesses."""
OPTIONS: Final = 12
"""Words of 8 bytes that the options of a place take."""


def grid_sizes(sizes: Sequence[int], widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(rows, places of each row) of the grids to capture, those of most places first."""
    fit = [(size, width) for size in sizes for width in widths if size * width <= MOST_PLACES]
    return tuple(sorted(fit, key=lambda each: -each[0] * each[1]))


@dataclass(frozen=True, slots=True)
class Outputs:
    """What replays leave, in static memory; the next one overwrites it."""

    before: torch.Tensor
    """int64[rows]."""
    tried: torch.Tensor
    """int64[rows]."""
    ids: torch.Tensor
    """int64[places]."""
    logits: torch.Tensor
    """float32[places, V]."""

    @classmethod
    def of(cls, rows: int, places: int, vocab_size: int, device: torch.device) -> Outputs:
        """Room for grids of up to so many rows and places."""
        before, tried, ids = (torch.zeros(count, dtype=torch.int64, device=device) for count in (rows, rows, places))
        return cls(before, tried, ids, torch.zeros(places, vocab_size, dtype=torch.float32, device=device))

    def grid(self, rows: torch.Tensor, width: int) -> Grid:
        """The grid of `rows`, int64[n], of the pool: views."""
        n = len(rows)
        return Grid(rows, self.before[:n], self.tried[:n], self.ids[: n * width].view(n, width))


class GridGraphs:
    """Graphs by (rows, width). Forward stream only."""

    def __init__(self, state: DeviceState, shapes: Sequence[tuple[int, int]], length: int, maker: GraphMaker) -> None:
        """`shapes`: as `grid_sizes` made them. `length`: tokens of a guess."""
        assert shapes, "there is something to capture"
        self._state = state
        self._shapes = tuple(shapes)
        self._length = length
        self._maker = maker
        self._graphs: dict[tuple[int, int], Graph] = {}
        places, rows = shapes[0][0] * shapes[0][1], max(size for size, _ in shapes)
        # Room for the sections, and beside them for every row fresh and one new page of table writes for every row; and
        # for each place its options, and random numbers for all that its row may have sampled meanwhile.
        beside = rows * (1 + 3 + CARRIED) + places * (OPTIONS + length) + LISTED
        self.block = StaticBlock(rows * (SECTIONS + length) + beside, state.staging)
        self.outputs = Outputs.of(rows, places, state.model.spec.vocab_size, state.streams.device)
        self.replays = 0
        """Number of steps replayed so far."""

    @torch.inference_mode()
    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Record all shapes, as `DecodeGraphs.capture` does."""
        self._graphs = record(self._state, self._maker, self._shapes, self._work, progress)

    def of(self, attempt: Attempt) -> AttemptGraphs:
        """Those of the width of `attempt`, to be loaded with it."""
        return AttemptGraphs(self, attempt)

    def size_for(self, batch: ScheduleBatch, width: int) -> int | None:
        """Rows, with padding, of the graph for `batch`; None where none is large enough or wide enough."""
        sizes = [size for size, wide in self._shapes if wide == width and size >= len(batch.rows)]
        if not sizes or hooks_layers(batch.companion_writes):
            return None
        beside = len(batch.fresh_rows) + 3 * len(batch.table_writes.rows)
        fits = min(sizes) * (SECTIONS + self._length) + beside <= self.block.memory.numel()
        return min(sizes) if fits else None

    def load(self, batch: ScheduleBatch, attempt: Attempt, carried: Sequence[np.ndarray] = ()) -> DecodeInputs:
        """See `DecodeGraphs.load`. The grid in it holds from the replay on."""
        size, writes = self.size_for(batch, attempt.width), batch.table_writes
        assert size is not None, "it was asked for first"
        sections = _sections(batch.rows, batch.lower_lens, batch.prefix_lens, attempt, size)
        beside = (batch.fresh_rows, writes.rows, writes.places, writes.pages)
        views, parcel = self.block.carry([*sections, *beside], carried)
        fresh, *table = views[len(sections) :]
        grid = self.outputs.grid(views[0], attempt.width)
        written = (table[0], table[1], table[2])
        return DecodeInputs(size, views[0], grid.before, fresh, written, grid, staging=parcel)

    def replay(self, inputs: DecodeInputs) -> torch.Tensor:
        """float32[n * W, V]: logits of all places of the real rows, a view that the next replay overwrites."""
        grid = inputs.trial
        assert grid is not None, "it was loaded here"
        self._graphs[inputs.size, grid.width].replay()
        self.replays += 1
        return self.outputs.logits[: grid.ids.numel()]

    def _nothing(self, width: int) -> Attempt:
        none = np.empty((0, self._length), np.int64)
        return Attempt(width, NO_LENGTHS, NO_LENGTHS, Guesses(none, NO_LENGTHS), NO_LENGTHS)

    def _work(self, shape: tuple[int, int]) -> Callable[[], None]:
        size, width = shape
        self.block.fill(_sections(NO_LENGTHS, NO_LENGTHS, NO_LENGTHS, self._nothing(width), size))
        state, outputs, places = self._state, self.outputs, size * width
        lengths = [size, size, size, size, size, size * self._length, size, size]
        rows, lower, upper, *arrays = self.block.memory[: sum(lengths)].split(lengths)
        kept = outputs.grid(rows, width)

        def work() -> None:
            entered = DecodeRows(rows, lower, upper).enter(state.future_map)
            grid = grid_of(rows, arrays, entered.ids, entered.lens, width, state.model.spec.vocab_size)
            kept.before.copy_(entered.lens)
            kept.tried.copy_(grid.tried)
            kept.ids.copy_(grid.ids)
            outputs.logits[:places].copy_(state.model.forward(grid_batch(state, grid)))

        return work


@dataclass(frozen=True, slots=True)
class AttemptGraphs:
    """The graphs for one attempt."""

    graphs: GridGraphs
    attempt: Attempt

    def takes(self, batch: ScheduleBatch) -> bool:
        """See `DecodeGraphs`."""
        return self.graphs.size_for(batch, self.attempt.width) is not None

    def load(self, batch: ScheduleBatch, carried: Sequence[np.ndarray] = ()) -> DecodeInputs:
        """See `DecodeGraphs`."""
        return self.graphs.load(batch, self.attempt, carried)

    def replay(self, inputs: DecodeInputs) -> torch.Tensor:
        """See `DecodeGraphs`; float32[T, V]."""
        return self.graphs.replay(inputs)


def capture_grid_graphs(
    state: DeviceState, graphs: DecodeGraphs | None, speculator: Verification | None
) -> GridGraphs | None:
    """Graphs of grids beside `graphs`; None where these are none, or drafts are verified otherwise."""
    if graphs is None or not isinstance(speculator, GridSpeculator):
        return None
    shapes = grid_sizes(state.graph_sizes, speculator.widths)
    if not shapes:
        return None
    grids = GridGraphs(state, shapes, speculator.length, graphs.maker)
    which = f"{len(shapes)} grids for drafts"
    return grids if captured("steps that verify drafts", which, grids.capture) else None


def _sections(rows: Ints, lower: Ints, upper: Ints, attempt: Attempt, size: int) -> list[Ints]:
    """Each input followed by its padding: row 0 at position 0, which tries nothing (law 6). `rows` comes first."""
    return [*sections_of(rows, lower, upper, size), *attempt.padded(size)]
