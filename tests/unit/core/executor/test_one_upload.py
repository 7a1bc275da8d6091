"""A step makes one copy from the host to the device, whatever its rows want, and readers find in it what they meant.

The mask of a grammar alone comes later: it waits for the token before, and the forward pass does not (law 14).

Uploads are packed as for CUDA and counted. Kernels of the sampler are stand-ins that keep what they were given: it must
be what they are given where each reader uploads its arrays on its own. Steps are launched and replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.grammar_batch import GrammarSeed
from core.batch.sampling_batch import SamplingBatch
from core.batch.schedule_batch import HistoryWrites
from core.device.parcel import Parcel
from core.device.staging import Staging
from core.executor import step
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites, Tracked
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pages import WindowWrites
from core.models.lora import slots as lora
from core.models.lora.recorded_hooks import Recordable
from core.models.lora.slots import LORA, AdapterSlots, LoraWrites, SlotWrite, group_tokens
from tests.support.fakes import grid_attention
from tests.support.fakes.step_grammar import StepGrammar
from tests.unit.core.executor import test_decode_graphs
from tests.unit.core.executor.test_captured_companions import CrossWorld, RecurrentWorld, WindowedWorld, ints
from tests.unit.core.executor.test_decode_graphs import VOCAB, SumModel, World, greedy
from tests.unit.core.executor.test_mixed_graphs import Chunk, mixed, mixed_world
from tests.unit.core.executor.test_nothing_compiled import upload_as_on_cuda
from tests.unit.core.sampling.batches import CPU

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")

ROWS = [3, 1, 5]
Told = list[torch.Tensor]
Options = Callable[[SamplingBatch], SamplingBatch]


def sampled(batch: SamplingBatch) -> SamplingBatch:
    """Rows at random, each with other options."""
    count = len(batch)
    return dataclasses.replace(
        batch,
        temperatures=np.linspace(0.5, 1.5, count, dtype=np.float32),
        top_ks=np.arange(2, 2 + count),
        top_ps=np.linspace(0.7, 0.9, count, dtype=np.float32),
        uniforms=np.linspace(0.1, 0.9, count)[:, None],
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
    )


def penalised(batch: SamplingBatch) -> SamplingBatch:
    lens = np.full(len(batch), 4)
    penalties = np.linspace(1.1, 1.5, len(batch), dtype=np.float32)
    return dataclasses.replace(batch, repetition_penalties=penalties, any_penalty=True, upper_lens=lens)


def biased(batch: SamplingBatch) -> SamplingBatch:
    one = np.ones(1, np.int64)
    bias = {"bias_rows": 0 * one, "bias_tokens": 7 * one, "bias_from": 0 * one, "bias_until": 99 * one}
    return dataclasses.replace(batch, **bias, bias_values=np.array([2.5], np.float32))


def told(batch: SamplingBatch) -> SamplingBatch:
    wanted = np.arange(len(batch)) - 1
    return dataclasses.replace(batch, logprobs=True, top_logprobs=max(1, int(wanted.max())), alternatives=wanted)


OPTIONS: dict[str, tuple[Options, ...]] = {
    "greedy": (),
    "sampled": (sampled,),
    "penalised": (penalised,),
    "biased": (biased,),
    "logprobs": (told,),
    "all": (sampled, penalised, biased, told),
}


def sampling(rows: list[int], kind: str) -> SamplingBatch:
    batch = greedy(ints(rows))
    for change in OPTIONS[kind]:
        batch = change(batch)
    return batch


def histories(rows: list[int], kind: str) -> HistoryWrites:
    """Texts of rows that have come new, as far as they have penalties."""
    wanted = penalised in OPTIONS[kind]
    return HistoryWrites(tuple(rows), tuple(np.arange(2, 2 + row) for row in rows)) if wanted else HistoryWrites()


class AdaptedWorld(World):
    """Its adapter is on a layer that the model never calls."""

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        layer = torch.nn.Linear(2, 2, bias=False)
        layer.weight.requires_grad_(False)
        self.slots = AdapterSlots(torch.nn.Sequential(layer), Recordable(torch.float32, 2))
        return SumModel(), {LORA: self.slots}


def adapter() -> Any:
    from core.models.lora.packed import Delta

    delta = Delta(torch.ones(1, 2), torch.ones(2, 1))
    return SimpleNamespace(deltas=lambda device: {"0": delta})


def adapted(world: Any) -> dict[str, object]:
    slots = ints([0, 2, 2])
    return {LORA: LoraWrites(groups=group_tokens(slots, np.ones_like(slots)), num_tokens=3, row_slots=slots)}


def states(world: Any) -> dict[str, object]:
    kept = Tracked(ints([1]), world.lens[[1]] + 1, ints([9]))
    return {STATES: StateWrites(ints([3, 5]), ints([3, 5]), ints([0, 0]), kept)}


def windows(world: Any) -> dict[str, object]:
    return {WINDOW: WindowWrites(ints([1, 2, 9]), ints([3, 1, 2]))}


def inputs(world: Any) -> dict[str, object]:
    found: dict[str, object] = world.writes(ROWS)
    return found


COMPANIONS: dict[str, tuple[type[World], Callable[[Any], dict[str, object]]]] = {
    "adapters": (AdaptedWorld, adapted),
    "recurrent": (RecurrentWorld, states),
    "windowed": (WindowedWorld, windows),
    "encoder": (CrossWorld, inputs),
}


class Counted:
    """A world on packed uploads, the transfers of its steps, and what kernels of the sampler were given."""

    def __init__(self, patch: pytest.MonkeyPatch, made: Callable[[], World], replays: bool, alone: bool) -> None:
        """`alone`: each reader uploads its own arrays."""
        from core.sampling.triton import sampler

        self.sent, self.given = list[int](), Told()
        upload_as_on_cuda(patch)
        packs = Staging.pinned

        def pinned(staging: Staging, ids: Any) -> torch.Tensor:
            found = packs(staging, ids)
            if type(staging) is not Parcel:
                self.sent.append(len(found))
            return found

        def sample_rows(logits: torch.Tensor, lens: torch.Tensor, *rest: Any, random: bool) -> None:
            *told, tokens, non_finite, _ = rest
            # What the kernel writes into begins as anything; the history is the whole buffer.
            read = [lens, *told[:6], told[7], told[9]]
            self.given += [each.clone() for each in read if each is not None]
            tokens.copy_(logits.argmax(-1))
            non_finite.zero_()

        def normalise(logits: torch.Tensor, asked: torch.Tensor, *_: Any) -> None:
            self.given.append(asked.clone())

        patch.setattr(Staging, "pinned", pinned)
        patch.setattr(sampler, "sample_rows", sample_rows)
        patch.setattr(sampler, "normalise", normalise)
        patch.setattr(test_decode_graphs, "Sampler", sampler.TritonSampler)
        patch.setattr(lora, "why_not_recorded", lambda _: None)
        # Which tokens are whose, our own backend is told by the step; this one only stands in for it.
        shared = SimpleNamespace(upload=lambda arrays: [torch.from_numpy(each) for each in arrays])
        patch.setattr(grid_attention, "Staging", lambda _: shared)
        if alone:
            patch.setattr(step, "carried", lambda *_: [])
        self.world: Any = made()
        if not replays:
            self.world.runner.graphs = self.world.runner.mixed = self.world.runner.grids = None

    def step(self, batch: Any) -> list[int]:
        self.sent, self.given = [], []
        tokens: list[int] = self.world.runner.launch(batch).result().tokens.tolist()
        return tokens

    @property
    def transfers(self) -> int:
        """Of the last step; `sent` has the words of 8 bytes of each."""
        return len(self.sent)

    @property
    def replayed(self) -> int:
        runner = self.world.runner
        return sum(each.replays for each in (runner.graphs, runner.mixed, runner.grids) if each is not None)


def compare(
    patch: pytest.MonkeyPatch, made: Callable[[], World], replays: bool, batch: Callable[[Any], Any], late: int = 0
) -> tuple[int, Any]:
    """Transfers of the step `batch(world)` where each reader uploads its own arrays, and the world where none does.

    `late`: words of 8 bytes of the masks that follow the one transfer.
    """
    found = []
    for alone in (True, False):
        with patch.context() as own:
            counted = Counted(own, made, replays, alone)
            found.append((counted, counted.step(batch(counted.world)), counted.sent))
    (each, expected, several), (together, tokens, sent) = found
    assert tokens == expected and len(each.given) == len(together.given) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(together.given, each.given, strict=True))
    assert sent[1:] == [late][: late > 0] and together.replayed == replays
    return len(several), together.world


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_decode_step_makes_one_upload(kind: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(world: World) -> Any:
        world.start(ROWS, [4, 5, 6], 4)
        return world.batch(ROWS, sampling=sampling(ROWS, kind), history_writes=histories(ROWS, kind))

    several, _ = compare(monkeypatch, World, replays, batch)
    assert several == {"greedy": 1, "penalised": 3, "all": 5}.get(kind, 2 + (kind == "sampled"))


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_a_mixed_step_makes_one_upload(kind: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that ends, one in its middle, and rows that decode beside them."""

    def batch(world: World) -> Any:
        world.start([1, 2], [4, 5], 4)
        rows, chunks = [4, 1, 2], [Chunk(3, (1, 2, 3), final=False), Chunk(4, (5, 6))]
        options = {"sampling": sampling(rows, kind), "history_writes": histories([4], kind)}
        return mixed(world, chunks, [1, 2], **options)

    several, world = compare(monkeypatch, mixed_world, replays, batch)
    assert several == (5 if kind == "all" else 1)
    assert world.map.buffer("new_seq_lens_buf")[[1, 2, 3, 4]].tolist() == [5, 5, 3, 2]


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("name", COMPANIONS)
def test_what_companions_write_comes_along(name: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, writes = COMPANIONS[name]

    def batch(world: Any) -> Any:
        world.start(ROWS, [4, 5, 6], 4)
        if name == "adapters":
            filled = LoraWrites(slots=(SlotWrite(2, adapter()),))
            world.runner.launch(world.batch([2], companion_writes={LORA: filled})).result()
            if world.runner.graphs is not None:
                world.runner.graphs.replays = 0
        if name == "encoder":
            for row in ROWS:
                world.encode(row, [row, 2, 3])
        return world.batch(ROWS, companion_writes=writes(world), sampling=sampling(ROWS, "sampled"))

    several, _ = compare(monkeypatch, kind, replays, batch)
    assert several == 3 + (name != "encoder" or not replays)


@needs_triton
@pytest.mark.parametrize("room", [0, 1], ids=["short", "just"])
def test_what_finds_no_room_in_static_memory_comes_in_the_same_upload(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a replay a long text begins to be penalised: inputs reach their fixed place through other memory."""
    text = HistoryWrites((3,), (np.arange(16) % VOCAB,))

    def batch(world: World) -> Any:
        world.start(ROWS, [4, 5, 6], 4)
        made = world.batch(ROWS, sampling=sampling(ROWS, "penalised"), history_writes=text)
        block = test_decode_graphs.graphs_of(world).block
        carried = world.runner._sampling.carried(made)
        words = 4 * 3 + sum(-(-each.nbytes // 8) for each in carried)
        block.memory = block.memory[: words - 1 + room]
        return made

    several, world = compare(monkeypatch, World, True, batch)
    assert several == 3
    history = world.runner._sampling._history.buffer[3, :16].tolist()
    assert history[:5] + history[6:] == text.ids[0].tolist()[:5] + text.ids[0].tolist()[6:], "and at 5 its new token"


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_a_mask_follows_alone(kind: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else its row wants is there already: the device waits for nothing but the bits."""

    def batch(world: World) -> Any:
        world.start(ROWS, [4, 5, 6], 4)
        options = dataclasses.replace(sampling(ROWS, kind), constrained=ints([0, 2]))
        seeds = tuple(GrammarSeed(row, 1, StepGrammar(), ints([])) for row in (3, 5))
        return world.batch(ROWS, sampling=options, history_writes=histories(ROWS, kind), grammar_seeds=seeds)

    compare(monkeypatch, World, replays, batch, late=2 * StepGrammar.words // 2)


def test_a_parcel_finds_arrays_by_identity_and_sends_the_rest() -> None:
    known, alike, other = np.arange(3), np.arange(3), np.array([0.5], np.float32)
    there = torch.tensor([7, 7, 7])
    parcel = Parcel(Staging(CPU), [known], [there])
    found, copied, sent = parcel.upload([known, alike, other])
    assert found is there and copied.tolist() == [0, 1, 2] and sent.tolist() == [0.5]
    assert parcel.upload([]) == []


@needs_triton
def test_attention_takes_the_segments_that_came_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.attention.triton.backend import TritonAttention

    world, seen = mixed_world(), []
    world.runner.mixed = None
    forward = world.model.forward
    monkeypatch.setattr(world.model, "forward", lambda batch: (seen.append(batch), forward(batch))[1])
    world.start([1], [4], 4)
    world.runner.launch(mixed(world, [Chunk(2, (1, 2, 3)), Chunk(3, (5,))], [1])).result()
    starts, prefixes = seen[0].segments
    assert starts.tolist() == [0, 3] and prefixes.tolist() == [0, 0]
    monkeypatch.setattr(Staging, "upload", lambda *_: pytest.fail("they are there"))
    attention = TritonAttention()
    attention.plan(seen[0])
    assert attention._segments is not None and attention._segments.starts is starts
