"""Adapters mixed in packed batches give the tokens that PEFT generates with each of them alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.invariants import InvariantViolation
from core.models.lora.checkpoint import AdapterLimits, read_adapter
from core.models.lora.packed import ALIGN_BYTES, Adapter
from core.models.lora.slots import AdapterSlots, LoraWrites, SlotWrite, group_tokens
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, PeftOracle, make_adapter
from tests.unit.core.models.reference import PackedRun, load

CPU = torch.device("cpu")
OUTPUT = 12
ROWS = 20
CHUNK = 7
LIMITS = AdapterLimits(max_rank=8)
CHOICES: tuple[str | None, ...] = (None, *ADAPTERS)


class Mixed:
    """A packed model whose rows each have an adapter, decoded greedily in mixed steps with chunked prompts."""

    def __init__(self, base: Path, prompts: dict[int, list[int]], chosen: dict[int, int]) -> None:
        self.model: Any = load(base)
        self.run = PackedRun(self.model, prompts, max_len=64)
        self.slots = AdapterSlots(self.model.module)
        self.chosen = {0: 0, **chosen}
        self.done = dict.fromkeys(prompts, 0)
        self.prompt_lens = {row: len(ids) for row, ids in prompts.items()}
        self.pending: list[SlotWrite] = []

    def read(self, directory: Path) -> Adapter:
        return read_adapter(directory, self.model.module, torch.float32, LIMITS)

    def step(self) -> bool:
        """Chunks of a few prompts beside every decode row; False when all have their tokens."""
        ids, left = self.run.sequences, [r for r in self.done if self.outputs(r) < OUTPUT]
        prefill = [r for r in left if self.done[r] < self.prompt_lens[r]][:3]
        decode = [r for r in left if self.done[r] >= self.prompt_lens[r]]
        parts = [Part(r, self.done[r], min(CHUNK, self.prompt_lens[r] - self.done[r])) for r in prefill]
        parts += [Part(r, self.done[r], 1) for r in decode]
        if not parts:
            return False
        row_slots = np.array([self.chosen[p.row] for p in parts])
        groups = group_tokens(row_slots, np.array([p.extend for p in parts]))
        tokens = sum(p.extend for p in parts)
        writes = LoraWrites(tuple(self.pending), groups, tokens) if groups or self.pending else None
        self.pending = []
        self.slots.begin(torch.tensor([p.row for p in parts]), writes, Staging(CPU))
        sample = [i for i, p in enumerate(parts) if p.prefix + p.extend >= self.prompt_lens[p.row]]
        logits = self.run.step(parts, len(prefill), sample)
        for part in parts:
            self.done[part.row] += part.extend
        for i, best in zip(sample, logits.argmax(-1).tolist(), strict=True):
            ids[parts[i].row].append(best)
        return True

    def outputs(self, row: int) -> int:
        return len(self.run.sequences[row]) - self.prompt_lens[row]

    def answer(self, row: int) -> list[int]:
        return self.run.sequences[row][self.prompt_lens[row] :]


def make_prompts(seed: int) -> dict[int, list[int]]:
    draw = random.Random(seed)
    return {r: [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 40))] for r in range(1, ROWS + 1)}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A base and its four adapters."""
    root = tmp_path_factory.mktemp(request.param)
    base = make_checkpoint(request.param, root / "base")
    made = {n: make_adapter(base, root / n, i, **arguments) for i, (n, arguments) in enumerate(ADAPTERS.items())}
    return base, made


def test_mixed_rows_equal_peft(served: tuple[Path, dict[str, Path]]) -> None:
    base, adapters = served
    prompts = make_prompts(0)
    mixed = Mixed(base, {r: list(p) for r, p in prompts.items()}, {r: r % len(CHOICES) for r in prompts})
    mixed.pending = [SlotWrite(i, mixed.read(path)) for i, path in enumerate(adapters.values(), start=1)]
    while mixed.step():
        pass
    oracle = PeftOracle(base, adapters)
    plain = 0
    for row, prompt in prompts.items():
        want = oracle.greedy(prompt, CHOICES[row % len(CHOICES)], OUTPUT)
        assert mixed.answer(row) == want, (row, CHOICES[row % len(CHOICES)])
        plain += want == oracle.greedy(prompt, None, OUTPUT)
    assert plain <= ROWS // 2, "the adapters hardly change anything, so equality says little"


def test_a_slot_changes_hands_between_steps(served: tuple[Path, dict[str, Path]]) -> None:
    """Loading into one slot in the middle of a run changes no row of another; the new owner gets the new weights."""
    base, adapters = served
    prompts = {r: ids for r, ids in make_prompts(1).items() if r <= 4}
    mixed = Mixed(base, {r: list(p) for r, p in prompts.items()}, {1: 1, 2: 2, 3: 0, 4: 1})
    wide, narrow, other = (adapters[name] for name in ("all", "narrow", "regex"))
    mixed.pending = [SlotWrite(1, mixed.read(wide)), SlotWrite(2, mixed.read(other))]
    held = {row: mixed.done.pop(row) for row in (4,)}
    while mixed.outputs(1) < OUTPUT:
        mixed.step()
    mixed.pending = [SlotWrite(1, mixed.read(narrow))]
    mixed.done.update(held)
    while mixed.step():
        pass
    oracle = PeftOracle(base, adapters)
    for row, name in ((1, "all"), (2, "regex"), (3, None), (4, "narrow")):
        assert mixed.answer(row) == oracle.greedy(prompts[row], name, OUTPUT), (row, name)


def test_slot_0_is_never_written(served: tuple[Path, dict[str, Path]]) -> None:
    base, adapters = served
    mixed = Mixed(base, make_prompts(2), {})
    for slot in (0, -1):
        with pytest.raises(AssertionError):
            writes = LoraWrites((SlotWrite(slot, mixed.read(adapters["narrow"])),))
            mixed.slots.begin(torch.tensor([1]), writes, Staging(CPU))


def test_a_step_with_an_empty_slot_does_not_run(served: tuple[Path, dict[str, Path]]) -> None:
    """It would give the base model's tokens in the adapter's name."""
    base, adapters = served
    mixed = Mixed(base, make_prompts(2), {})
    groups = ((1, np.arange(3)),)

    def begin(*writes: SlotWrite) -> None:
        mixed.slots.begin(torch.tensor([1]), LoraWrites(writes, groups), Staging(CPU))

    with pytest.raises(InvariantViolation, match="adapter_slot_filled"):
        begin()
    begin(SlotWrite(1, mixed.read(adapters["narrow"])))
    with pytest.raises(InvariantViolation, match="adapter_slot_filled"):
        begin(SlotWrite(1, None))
    assert mixed.slots.nbytes == 0


def test_an_adapter_takes_what_it_has(served: tuple[Path, dict[str, Path]]) -> None:
    """No padding to the highest rank: what is counted against the bound is what the matrices need, and gaps."""
    base, adapters = served
    mixed = Mixed(base, make_prompts(2), {})
    for name, arguments in ADAPTERS.items():
        adapter = mixed.read(adapters[name])
        mixed.slots.begin(torch.tensor([1]), LoraWrites((SlotWrite(1, adapter),)), Staging(CPU))
        gaps = adapter.nbytes - mixed.slots.nbytes
        assert 0 <= gaps < 2 * ALIGN_BYTES * len(adapter.places), name
        assert adapter.rank == max(arguments["r"] if name != "patterns" else 6, 1), name
        starts = [each for place in adapter.places.values() for each in (place.a, place.b)]
        assert all(start * adapter.buffer.itemsize % ALIGN_BYTES == 0 for start in starts), name


def test_steps_without_adapters_keep_the_quick_path(served: tuple[Path, dict[str, Path]]) -> None:
    """A loaded adapter costs nothing in steps where no row has it: no layer is hooked then."""
    base, adapters = served
    mixed = Mixed(base, make_prompts(3), {})
    narrow, wide = (SlotWrite(i, mixed.read(adapters[name])) for i, name in ((1, "narrow"), (2, "all")))

    def hooks_after(writes: LoraWrites | None) -> int:
        mixed.slots.begin(torch.tensor([1]), writes, Staging(CPU))
        layers = (module for module in mixed.model.module.modules() if isinstance(module, torch.nn.Linear))
        return sum(len(layer._forward_hooks) for layer in layers)

    groups = ((1, np.arange(3)),)
    assert hooks_after(LoraWrites((narrow,))) == 0
    assert hooks_after(LoraWrites((), groups)) == 4, "q and v of two layers"
    assert hooks_after(LoraWrites((wide,), groups)) == 14, "layers that a later adapter is the first to target"
    assert hooks_after(None) == 0


def test_tokens_are_grouped_by_slot() -> None:
    groups = group_tokens(np.array([2, 0, 1, 2]), np.array([3, 2, 1, 1]))
    assert [(slot, places.tolist()) for slot, places in groups] == [(1, [5]), (2, [0, 1, 2, 6])]
    assert group_tokens(np.array([0, 0]), np.array([3, 2])) == ()


def test_drafts_have_the_adapter_of_their_row(served: tuple[Path, dict[str, Path]]) -> None:
    """How many of its tokens a step computes is known when it begins, and where they stand follows from that."""
    base, adapters = served
    mixed = Mixed(base, make_prompts(2), {})
    filled = SlotWrite(1, mixed.read(adapters["narrow"])), SlotWrite(2, mixed.read(adapters["regex"]))
    row_slots, lens = np.array([2, 0, 1]), np.array([5, 9, 7])

    def groups(*counts: int) -> dict[int, list[int]]:
        mixed.slots.measured(lens, np.array(counts), Staging(CPU))
        return {group.slot: group.on_device.tolist() for group in mixed.slots._groups}

    planned = group_tokens(row_slots, np.ones(3, np.int64))
    mixed.slots.begin(torch.arange(1, 4), LoraWrites(filled, planned, 3, row_slots), Staging(CPU))
    assert groups(1, 1, 1) == {1: [2], 2: [0]}
    assert groups(3, 1, 2) == {1: [4, 5], 2: [0, 1, 2]}
    mixed.slots.begin(torch.arange(1, 4), None, Staging(CPU))
    assert groups(3, 1, 2) == {}, "none of these rows has an adapter"
