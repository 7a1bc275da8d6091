"""What rank 0 tells of drafts is what the other ranks try and judge by."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.spec_plan import Aim, SpecPlan, TextSeed
from core.device.staging import Staging
from core.distributed import drafts
from core.distributed.drafts import FollowingGrid, FollowingSpeculator, LeadingGrid, LeadingSpeculator
from core.distributed.leader import plain
from core.executor.grid_speculator import GridSpeculator
from core.executor.speculator import Speculator
from core.executor.verification import Attempt
from core.speculation.drafter import Drafts
from core.speculation.guesses import Guesses
from core.speculation.trial import Trial
from tests.unit.core.distributed.test_leader import batch
from tests.unit.core.distributed.test_wire import ints, same

STAGING = Staging(torch.device("cpu"))


class Cable:
    """A `World` of two ranks, both of which are here."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def receive(self) -> memoryview:
        assert self.sent, "the other rank has said nothing"
        return np.frombuffer(bytearray(self.sent.popleft()), np.uint8).data


def trial() -> Trial:
    """Of two rows: one has two drafts, and one has none."""
    found = Drafts(np.array([[7, 8, 9], [1, 1, 1]]), ints(2, 0))
    return Trial.of(ints(4, 5), ints(10, 20), found, ints(3, 3), 100)


def verifying(*, verifies: bool = True) -> Any:
    return SimpleNamespace(verifies=verifies)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Cable, LeadingSpeculator, FollowingSpeculator, list[Trial | None]]:
    """The two sides of one cable, and what rank 0 finds to try, from the end."""
    cable: Any = Cable()
    found: list[Trial | None] = []
    monkeypatch.setattr(Speculator, "__init__", lambda *_: None)
    monkeypatch.setattr(Speculator, "trial", lambda *_: found.pop())
    nothing: Any = None
    return cable, LeadingSpeculator(cable, nothing, nothing), FollowingSpeculator(cable, nothing), found


NOTHING: Any = None


@pytest.mark.parametrize("most", [None, ints(2, 1)])
def test_all_ranks_judge_alike(pair: Any, most: np.ndarray | None) -> None:
    """By rank 0's tokens, and by how many places of a row its constraints let count."""
    cable, leader, follower, found = pair
    found.append(trial())
    told = leader.trial(verifying(), NOTHING, NOTHING, STAGING)
    heard = follower.trial(verifying(), NOTHING, NOTHING, STAGING)
    assert all(same(getattr(heard, each.name), getattr(told, each.name)) for each in fields(Trial))
    tokens = torch.tensor([7, 8, 3, 6])
    ours, theirs = told.judge(tokens, most, STAGING), heard.judge(tokens, None, STAGING)
    assert ours.outcome.counts.tolist() == ([3, 1] if most is None else [2, 1])
    assert theirs.outcome.counts.tolist() == ours.outcome.counts.tolist()
    assert theirs.lens.equal(ours.lens) and theirs.newest.equal(ours.newest) and not cable.sent


def test_a_step_that_tries_nothing_is_told_of_too(pair: Any) -> None:
    """Or the others would take the next message for it."""
    cable, leader, follower, found = pair
    found.append(None)
    assert leader.trial(verifying(), NOTHING, NOTHING, STAGING) is None and len(cable.sent) == 1
    assert follower.trial(verifying(), NOTHING, NOTHING, STAGING) is None and not cable.sent


def test_of_steps_that_may_try_nothing_no_word_is_said(pair: Any) -> None:
    cable, leader, follower, found = pair
    found.append(None)
    step = verifying(verifies=False)
    assert leader.trial(step, NOTHING, NOTHING, STAGING) is None and not cable.sent
    assert follower.trial(step, NOTHING, NOTHING, STAGING) is None


@pytest.mark.parametrize("found", [True, False])
def test_grids_are_of_the_same_guesses(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = Guesses(np.array([[7, 8, 9], [1, 1, 1]]), ints(3, 0))
    attempt = Attempt(3, ints(2, 0), ints(90, 90), guesses, ints(11, 21)) if found else None
    monkeypatch.setattr(GridSpeculator, "__init__", lambda *_: None)
    monkeypatch.setattr(GridSpeculator, "begin", lambda *_: attempt)
    cable: Any = Cable()
    leader, follower = LeadingGrid(cable, NOTHING, NOTHING, 3), FollowingGrid(cable, NOTHING, 3)
    assert leader.begin(verifying()) is attempt
    heard = follower.begin(verifying())
    assert same(heard, attempt) and follower._attempt is heard and not cable.sent
    monkeypatch.setattr(GridSpeculator, "begin", lambda *_: None)
    step = verifying(verifies=False)
    assert leader.begin(step) is None and not cable.sent and follower.begin(step) is None


def test_texts_stay_with_rank_0() -> None:
    """They are what it drafts from; the others have no use for them."""
    spec = SpecPlan(ints(2), ints(90), Aim(3, 0.5), (TextSeed(1, "scope", ints(1, 2)),))
    told = plain(replace(batch(1), spec=spec)).spec
    assert told is not None and told.seeds == () and told.drafts is spec.drafts and told.aim == spec.aim
    assert plain(batch(1)).spec is None
    assert drafts.FollowingSpeculator.needs_hidden == drafts.NO_HIDDEN


def test_a_heard_trial_is_computed_behind_what_is_in_the_pools() -> None:
    pool = SimpleNamespace(slots_on_host=lambda rows, positions: rows * 100 + positions, table=None)
    state: Any = SimpleNamespace(pool=pool, staging=STAGING, kv_pool=None)
    step: Any = SimpleNamespace(rows=ints(3, 4))
    decoding: Any = SimpleNamespace(rows=torch.tensor([3, 4]))
    made = FollowingSpeculator(NOTHING, state).forward_batch(step, decoding, trial())
    assert made.seq_lens.tolist() == [13, 21] and made.prefix_lens_host.tolist() == [10, 20]
    assert made.input_ids.tolist() == [4, 7, 8, 5] and made.positions.tolist() == [10, 11, 12, 20]
    assert made.out_cache_loc.tolist() == [310, 311, 312, 420] and made.extend_lens_host.tolist() == [3, 1]
