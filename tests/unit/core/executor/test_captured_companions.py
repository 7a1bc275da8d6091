"""Decode steps that read pools beside the keys, captured: rows with recurrent states, encoder inputs or windows.

Random rows step together in two worlds, one of which replays graphs; what they say and what they leave must be equal.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from core.device.streams import DeviceStreams
from core.executor.decode_graphs import capture_decode_graphs
from core.memory.companion import AdmissionFacts
from core.memory.cross.cross_pages import CROSS, CrossPages
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool, StateLayerSpec, StateShape
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites, Tracked
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pages import WindowPages
from core.memory.window.window_pool import SlidingWindowPool
from core.models.encoder_decoder.cross_attention import CrossAttention
from core.models.hf.recurrent import PackedMixer, StateContext
from core.models.hf.windowed import WindowedLayers
from core.types.arrays import Ints
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.attention.dense import LAYER
from tests.unit.core.executor.test_decode_graphs import PAGE, ROWS, SPEC, WIDTH, SumModel, World, graphs_of

EVERY = list(range(1, ROWS + 1))
NOTHING = np.empty(0, np.int64)
STATE = StateLayerSpec(0, StateShape((1, 2), torch.float32), StateShape((1,), torch.float32))
SLOTS = 2 * ROWS
WINDOW_TOKENS = 6


def ints(values: Any) -> Ints:
    return np.array(values, np.int64)


def packed(values: torch.Tensor) -> torch.Tensor:
    """[1, T, 2] of int64[T], as the keys and values of SumModel are."""
    return torch.stack([values.float(), torch.ones_like(values).float()], dim=-1)[None]


class RecurrentModel(SumModel):
    """Adds what a mixer says that sees one request per batch entry, with its state."""

    def __init__(self, pool: HybridReqToTokenPool) -> None:
        super().__init__()
        self.spec = dataclasses.replace(SPEC, state_layers=(STATE,))
        self.context = StateContext(pool)
        self.mixer = PackedMixer(self.mix, STATE.layer_id, False, self.context)

    @staticmethod
    def mix(hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
        """[n, 1, 1] of hidden [n, 1, 1]; the order of tokens counts."""
        seen = cache.update_conv_state(hidden_states.transpose(1, 2), 0).sum(-1)
        newest = (2 * cache.get_recurrent_state(0) + seen) % 97
        return cache.update_recurrent_state(newest, 0)[:, None]

    def total(self, batch: Any) -> torch.Tensor:
        self.context.begin(batch)
        mixed = self.mixer(batch.input_ids.float()[None, :, None])
        return super().total(batch) + mixed[0, :, 0].long()


class RecurrentWorld(World):
    """Row r begins in slot r; the slots behind these are for snapshots."""

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        self.states = HybridReqToTokenPool(self.pool, MambaPool((STATE,), SLOTS, self.streams.device))
        return RecurrentModel(self.states), {STATES: self.states}

    def held(self) -> list[torch.Tensor]:
        """All states but padding, on the host."""
        self.streams.synchronize()
        pool = self.states.states
        held = pool.conv(STATE.layer_id), pool.recurrent(STATE.layer_id)
        return [each[1:].cpu() for each in held if each is not None]


class CrossModel(SumModel):
    """Adds the sum of what the encoder left for a row."""

    def __init__(self, cross: CrossPool) -> None:
        super().__init__()
        self.cross = CrossAttention(cross, self.attention.sibling())

    def total(self, batch: Any) -> torch.Tensor:
        self.cross.plan(batch)
        seen = self.cross.forward(LAYER, torch.zeros_like(packed(batch.input_ids)), 1.0)
        return super().total(batch) + (seen[:, 0, 0] * (self.cross.cross.last_places + 1)).round().long()


class CrossWorld(World):
    """Rows with encoder inputs of other lengths."""

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        self.host = CrossPages(3 * ROWS, PAGE, ROWS + 1)
        self.cross = CrossPool(self.pool, KVPool(SPEC.kv_layers, 3 * ROWS, PAGE, SPEC.dtype, self.streams.device), 12)
        return CrossModel(self.cross), {CROSS: self.cross}

    def encode(self, row: int, values: Sequence[int]) -> None:
        """As if the first chunk of a new owner of `row` had encoded `values`."""
        if self.host._lens[row]:
            self.host.released(row)
        self.host.admitted(row, AdmissionFacts(1, NOTHING, 0, len(values)))
        at, one = np.array([row]), np.ones(1, np.int64)
        device = self.streams.device
        writes = self.host.planned(at, 0 * one, one, NOTHING)
        with self.streams.on_forward(), torch.inference_mode():
            self.cross.begin(torch.tensor(at, device=device), writes, self.runner.state.staging)
            kv = packed(torch.tensor(values, device=device))[0][:, None]
            self.cross.pool.write(LAYER, self.cross.input_slots, kv, kv)

    def writes(self, rows: list[int]) -> dict[str, object]:
        at = np.array(rows)
        return {CROSS: self.host.planned(at, self.lens[at], np.ones_like(at), NOTHING)}


class WindowedModel(SumModel):
    """Adds the sum of what a window of the newest tokens holds, in pages of another pool."""

    def __init__(self, windows: SlidingWindowPool) -> None:
        super().__init__()
        self.windowed = WindowedLayers(windows, self.attention)

    def total(self, batch: Any) -> torch.Tensor:
        self.windowed.plan(batch)
        kv = packed(batch.input_ids)
        seen = self.attention.forward(LAYER, torch.zeros_like(kv), kv, kv, scale=1.0, sliding_window=WINDOW_TOKENS)
        total = (seen[:, 0, 0] * batch.seq_lens.clamp(max=WINDOW_TOKENS)).round().long()
        return super().total(batch) + total


class WindowedWorld(World):
    """Fewer window pages than keys have, so that they change hands while rows decode; as many as all rows may need."""

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        bounds = WindowBounds(WINDOW_TOKENS, PAGE, chunk=WIDTH)
        size, pages = ROWS * bounds.per_row, ROWS * WIDTH // PAGE
        self.host = WindowPages(size, pages, ROWS + 1, bounds)
        kv = KVPool((KVLayerSpec(LAYER, 1, 2, 2),), size, PAGE, SPEC.dtype, self.streams.device, WINDOW)
        self.windows = SlidingWindowPool(kv, pages)
        return WindowedModel(self.windows), {WINDOW: self.windows}

    def pages(self, rows: list[int]) -> np.ndarray:
        """The KV pages of `rows`, as `World.start` gave them."""
        per_row = WIDTH // PAGE
        return np.array([[1 + (row - 1) * per_row + place for place in range(per_row)] for row in rows])

    def prompt(self, row: int) -> None:
        """As if a new owner of `row` had computed a prompt of `lens[row]` tokens, which are all its row."""
        if self.host._own[row]:
            self.host.released(row)
            self.host.freed(self.pages([row])[0])
        self.host.admitted(row, AdmissionFacts(int(self.lens[row]), NOTHING, 0))
        at, device = np.array([row]), self.streams.device
        writes = self.host.planned(at, np.zeros(1, np.int64), self.lens[at], self.pages([row]))
        with self.streams.on_forward(), torch.inference_mode():
            self.windows.begin(torch.tensor(at, device=device), writes, self.runner.state.staging)
            slots = self.pool.table[row, : self.lens[row]].long()
            named = self.windows.table[slots // PAGE].long() * PAGE + slots % PAGE
            kv = packed(torch.full_like(slots, row))[0][:, None]
            self.windows.kv.write(LAYER, named, kv, kv)

    def writes(self, rows: list[int]) -> dict[str, object]:
        at = np.array(rows)
        found = self.host.planned(at, self.lens[at], np.ones_like(at), self.pages(rows))
        return {} if found is None else {WINDOW: found}


def both(kind: type[World], streams: Callable[[], DeviceStreams] = GraphStreams) -> tuple[Any, Any]:
    """A world that replays, and one that does not, each on `streams` of its own."""
    world, plain = kind(streams()), kind(streams())
    plain.runner.graphs = None
    for each in (world, plain):
        each.start(EVERY, [3, 5, 7, 9, 11, 13, 15, 17], 4)
    return world, plain


def random_rows(draw: random.Random) -> list[int]:
    return draw.sample(EVERY, draw.choice([1, 2, 3, 5, 8]))


def ends(world: World, row: int, draw: random.Random) -> bool:
    """Whether `row` gets a new owner now: by chance, or because its last one has come to its end."""
    return bool(world.lens[row] >= WIDTH - 1) or draw.random() < 0.2


def test_recurrent_rows_go_on_from_their_states(seed: int) -> None:
    """With new owners, who begin from zeros or from a snapshot, and snapshots of any rows."""
    compare_states(*both(RecurrentWorld), draw=random.Random(seed), steps=12)


def compare_states(world: RecurrentWorld, plain: RecurrentWorld, draw: random.Random, steps: int) -> None:
    unmapped = set(EVERY)
    for _ in range(steps):
        rows = random_rows(draw)
        fresh = [row for row in rows if row in unmapped or ends(world, row, draw)]
        unmapped -= set(fresh)
        for row in fresh:
            length, token = draw.randint(1, 5), draw.randrange(1, 20)
            for each in (world, plain):
                each.start([row], [token], length)
        places = [place for place in range(len(rows)) if draw.random() < 0.3]
        slots = draw.sample(range(ROWS + 1, SLOTS + 1), len(places))
        kept = Tracked(ints(places), world.lens[ints(rows)[places]] + 1, ints(slots))
        sources = [draw.choice([0, *range(ROWS + 1, SLOTS + 1)]) for _ in fresh]
        writes = StateWrites(ints(fresh), ints(fresh), ints(sources), kept)
        given = {STATES: writes} if fresh or places else {}
        assert world.step(rows, companion_writes=given) == plain.step(rows, companion_writes=given)
        for mine, theirs in zip(world.held(), plain.held(), strict=True):
            assert torch.equal(mine, theirs)
    assert graphs_of(world).replays == steps
    assert not world.states.mapping[0], "padded rows have slot 0"


def test_states_of_drafts_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    world = RecurrentWorld()
    drafting = dataclasses.replace(world.runner.state, verification=lambda _: pytest.fail("not asked"))
    with caplog.at_level("INFO"):
        assert capture_decode_graphs(drafting, drafting.graph_sizes, drafting.attention) is None
    assert "drafts" in caplog.text


def test_rows_read_their_own_input_of_the_encoder(seed: int) -> None:
    compare_inputs(*both(CrossWorld), draw=random.Random(seed), steps=12)


def compare_inputs(world: CrossWorld, plain: CrossWorld, draw: random.Random, steps: int) -> None:
    new = set(EVERY)
    for _ in range(steps):
        rows = random_rows(draw)
        for row in rows:
            if row in new or ends(world, row, draw):
                values = [draw.randrange(40) for _ in range(draw.randint(1, 12))]
                length, token = draw.randint(1, 5), draw.randrange(1, 20)
                for each in (world, plain):
                    each.start([row], [token], length)
                    each.encode(row, values)
        new -= set(rows)
        mine, theirs = (each.step(rows, companion_writes=each.writes(rows)) for each in (world, plain))
        assert mine == theirs
    assert graphs_of(world).replays == steps
    assert not world.cross.table[0].any() and world.cross.lens[0] == 1, "padded rows see the token in slot 0"


def test_windows_move_over_pages_of_their_own(seed: int) -> None:
    """Rows come to keys that no window of theirs reaches any more, whose pages others take."""
    compare_windows(*both(WindowedWorld), draw=random.Random(seed), steps=24)


def compare_windows(world: WindowedWorld, plain: WindowedWorld, draw: random.Random, steps: int) -> None:
    new, moved = set(EVERY), 0
    for _ in range(steps):
        rows = random_rows(draw)
        for row in rows:
            if row in new or ends(world, row, draw):
                length, token = draw.randint(1, 5), draw.randrange(1, 20)
                for each in (world, plain):
                    each.start([row], [token], length)
                    each.prompt(row)
        new -= set(rows)
        given = world.writes(rows)
        moved += len(given)
        assert world.step(rows, companion_writes=given) == plain.step(rows, companion_writes=plain.writes(rows))
    assert graphs_of(world).replays == steps and moved > 3
    assert not world.windows.table[0], "padding has its own page"
