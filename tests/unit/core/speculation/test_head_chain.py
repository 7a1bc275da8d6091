"""Several heads, one behind the other: each runs over each place with the right token and state, in any steps.

The heads here are arithmetic: what one makes of a place is a number that tells all tokens that led to it, so a place, a
token or a state that is off by one shows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.eagle.head import HeadStep
from core.relay.future_map import FutureMap
from core.speculation.eagle_places import HeadPlaces
from core.speculation.head_chain import ChainRun, HeadChain
from core.types.arrays import Ints

ROWS, WIDTH, VOCAB, MODULUS = 3, 80, 97, 10007
CPU = torch.device("cpu")


def made(state: int, token: int, number: int) -> int:
    """What head `number` makes of a state and a token."""
    return (state * 31 + token * 7 + number + 1) % MODULUS


class CountingHead:
    """A `Head` that keeps what it made by slot."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.kept: dict[int, int] = {}
        self.firsts: dict[int, int] = {}
        """By row, the first place of its last step."""
        self.places = 0

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        assert (step.extends > 0).all() and step.extends.sum() == len(step.ids) == len(step.slots)
        self._see_that_places_are_those_of_the_table(step)
        self.places += len(step.ids)
        found = [
            made(int(state), token, self._number)
            for state, token in zip(step.features[:, 0].tolist(), step.ids.tolist(), strict=True)
        ]
        self.kept.update(zip(step.slots.tolist(), found, strict=True))
        states = torch.tensor(found, dtype=torch.float64)[:, None]
        return states.index_select(0, step.wanted).float(), states

    def _see_that_places_are_those_of_the_table(self, step: HeadStep) -> None:
        at = 0
        for row, first, count in zip(step.rows.tolist(), step.prefixes.tolist(), step.extends.tolist(), strict=True):
            places = torch.arange(first, first + count)
            assert torch.equal(step.positions[at : at + count], places)
            assert torch.equal(step.slots[at : at + count], step.table[row, places].long())
            self.firsts[row] = first
            at += count


class World:
    """Rows with a random text each, over which heads run step by step."""

    def __init__(self, heads: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.heads = [CountingHead(number) for number in range(heads)]
        self.chain = HeadChain(self.heads, 1, torch.float64)
        pool, checks = ReqToTokenPool(ROWS, WIDTH, CPU), DeviceChecks(AssertMode.TRAP, CPU)
        self.relay = FutureMap(pool, DeviceStreams(CPU), checks, self.chain.columns)
        self.table = torch.from_numpy(rng.permutation(np.arange(1, (ROWS + 1) * WIDTH + 1)).reshape(ROWS + 1, WIDTH))
        self.texts: Ints = rng.integers(0, VOCAB, (ROWS + 1, WIDTH + 1))
        self.ends = dict.fromkeys(range(1, ROWS + 1), 0)
        self.owned = dict(self.ends)
        """First place of each row that is its own."""

    def begin(self, row: int, found: int) -> None:
        """A new owner, who found `found` tokens."""
        self.relay.forget(torch.tensor([row]))
        self._forget(row)
        self.ends[row] = self.owned[row] = found

    def miss(self, row: int, count: int) -> None:
        """Places that the heads never run over."""
        self.ends[row] += count
        self.owned[row] = self.ends[row]
        self._forget(row)

    def _forget(self, row: int) -> None:
        for head in self.heads:
            head.firsts.pop(row, None)

    def run(self, counts: dict[int, int]) -> tuple[ChainRun, HeadPlaces]:
        rows, ns = np.array(list(counts)), np.array(list(counts.values()))
        firsts = np.array([self.ends[row] for row in counts])
        at = [(row, self.ends[row] + i) for row, count in counts.items() for i in range(count)]
        ids = torch.tensor([int(self.texts[row, place + 1]) for row, place in at])
        states = torch.tensor([[float(self.state(row, place))] for row, place in at], dtype=torch.float64)
        slots = torch.tensor([int(self.table[row, place]) for row, place in at])
        places = HeadPlaces(rows, firsts, ns, ids, states, torch.tensor([place for _, place in at]), slots)
        return self.chain.over(places, self.table, self.relay), places

    def step(self, counts: dict[int, int], drafting: dict[int, int]) -> None:
        """Run over so many places of each row, and draft so often for some; check all that comes of it."""
        run, places = self.run(counts)
        rows, drafts = places.rows.tolist(), {row: list[int]() for row in drafting}
        for number in range(max(drafting.values(), default=0)):
            lines = np.array([i for i, row in enumerate(rows) if drafting.get(row, 0) > number])
            newest = np.array([drafts[rows[line]][-1] for line in lines]) if number else None
            said, states = run.next(lines, newest)
            for line, logit, state in zip(lines.tolist(), said[:, 0].tolist(), states[:, 0].tolist(), strict=True):
                row = rows[line]
                last = self.ends[row] + counts[row] - 1
                assert logit == state == self.truth(row, last, number, drafts[row]), (row, number)
                drafts[row].append(int(self.rng.integers(VOCAB)))
        run.finish()
        for row, count in counts.items():
            assert all(head.firsts.get(row, WIDTH) >= self.owned[row] for head in self.heads), "not in found pages"
            self.ends[row] += count
        self.look()

    def look(self) -> None:
        """Each head has run over all places of which it knows the token, and whose state it could have."""
        for row, end in self.ends.items():
            for number, head in enumerate(self.heads):
                for place in range(self.owned[row], end - number):
                    found = head.kept[int(self.table[row, place])]
                    assert found == self.truth(row, place, number, ()), (row, number, place)

    def state(self, row: int, place: int) -> int:
        return int(self.texts[row, place]) * 100 + place

    def truth(self, row: int, place: int, number: int, drafts: list[int] | tuple[()]) -> int:
        """What head `number` makes of `place`, where `drafts` come behind the newest token."""
        text = [*self.texts[row, : place + 2].tolist(), *drafts]
        if not drafts:
            text = self.texts[row].tolist()
        value = self.state(row, place)
        for head in range(number + 1):
            value = made(value, int(text[place + 1 + head]), head)
        return value


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_each_place_has_its_token_and_its_state(heads: int, seed: int) -> None:
    """In steps of one token and of many, with drafts and without, with gaps, found prefixes and other owners."""
    rng = np.random.default_rng(seed)
    world = World(heads, rng)
    for _ in range(150):
        rows = [row for row in range(1, ROWS + 1) if rng.random() < 0.7 and world.ends[row] < WIDTH - 20]
        for row in range(1, ROWS + 1):
            if world.ends[row] >= WIDTH - 20 or rng.random() < 0.03:
                world.begin(row, int(rng.integers(3)) * 4)
            elif rng.random() < 0.03:
                world.miss(row, 2)
        counts = {row: int(rng.integers(1, 4 if rng.random() < 0.8 else 9)) for row in rows}
        if counts:
            world.step(counts, {row: int(rng.integers(1, heads + 1)) for row in counts if rng.random() < 0.7})


def test_a_step_without_drafts_runs_each_head_once_for_a_token() -> None:
    """What was run over with drafts for tokens is all that is run over again."""
    world = World(3, np.random.default_rng(1))
    world.step({1: 10}, {})
    assert [head.places for head in world.heads] == [10, 9, 8]
    world.step({1: 1}, {1: 3})
    assert [head.places for head in world.heads] == [11, 11, 11], "up to the last place of all"
    world.step({1: 1}, {})
    assert [head.places for head in world.heads] == [12, 12, 12]


def test_one_head_has_no_columns() -> None:
    assert HeadChain([CountingHead(0)], 1, torch.float64).columns == ()
    names = [column.name for column in HeadChain([CountingHead(k) for k in range(3)], 1, torch.float64).columns]
    assert names == ["heads_end", "heads_reach", "head_1_reads", "head_2_reads"]


def test_a_step_that_fails_leaves_a_gap() -> None:
    """The next step starts anew: what it has not is not taken for something else."""
    world = World(3, np.random.default_rng(2))
    world.step({1: 6}, {})
    run, _ = world.run({1: 2})
    run.next(np.array([0]), None)
    world.miss(1, 2)
    world.step({1: 2}, {1: 3})
    world.step({1: 2}, {1: 3})
