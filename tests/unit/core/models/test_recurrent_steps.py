"""States that are kept on the way through a prompt, in decode or behind drafts are those that others can go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from core.attention.registry import build_attention
from core.device.staging import Staging
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites, Tracked
from core.memory.req_to_token_pool import ReqToTokenPool
from core.types.arrays import Ints
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel, load
from tests.unit.core.models.test_transformers_backend import sequences

SLOTS = 8
ROOM = 5
"""Drafts of one step."""
THREE = dict.fromkeys((1, 2, 3), sequences()[1])
"""Rows of the same tokens."""


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


class RecurrentRun(PackedRun):
    """Rows with recurrent states, each of which takes over the tokens and, if it `shares`, the pages of row 1."""

    shares = True

    def rebind(self) -> None:
        """See `PackedRun`."""
        pool = MambaPool(self.model.spec.state_layers, SLOTS, CPU, ROOM)
        self.states: HybridReqToTokenPool = HybridReqToTokenPool(ReqToTokenPool(len(self.sequences), 8, CPU), pool)
        if self.shares:
            self.paged.table[2:] = self.paged.table[1]
        self.model.bind(self.paged.pool, build_attention("auto", CPU), {STATES: self.states})

    def enter(self, parts: Sequence[Part]) -> None:
        """Not here: `begin` says what a step does to states."""

    def begin(self, parts: list[Part], writes: StateWrites | None) -> None:
        """What the step of `parts` does to states, before it runs."""
        self.states.begin(torch.tensor([part.row for part in parts]), writes, Staging(CPU))


@pytest.mark.parametrize("kind", ["jamba", "bamba", "qwen3_next"])
def test_a_state_that_is_kept_is_the_one_of_its_prefix(checkpoint: Callable[[str], Path], kind: str) -> None:
    path = checkpoint(kind)
    resume_from_kept_states(path, RecurrentRun(load(path), THREE))


def resume_from_kept_states(path: Path, run: RecurrentRun) -> None:
    """Rows of THREE go on from states which others kept; compared with the plain model of `path`."""
    want = PlainModel(path).logits(THREE[1])
    # Row 1 keeps two states within its prompt, and the one of its first output.
    prompt, output = [Part(1, 0, 13)], [Part(1, 13, 1)]
    kept = Tracked(places=ints(0, 0), ends=ints(5, 9), slots=ints(4, 5))
    run.begin(prompt, StateWrites(ints(1), ints(1), ints(0), kept))
    torch.testing.assert_close(run.step(prompt, 1)[0], want[12], atol=1e-4, rtol=0)
    nothing = ints()
    run.begin(output, StateWrites(nothing, nothing, nothing, Tracked(ints(0), ints(14), ints(6))))
    torch.testing.assert_close(run.step(output, 0)[0], want[13], atol=1e-4, rtol=0)
    # Two go on from what it kept, in one step with it, and one of them and it keep another state each.
    parts = [Part(2, 5, 6), Part(3, 9, 5), Part(1, 14, 1)]
    kept = Tracked(places=ints(1, 2), ends=ints(11, 15), slots=ints(7, 8))
    run.begin(parts, StateWrites(ints(2, 3), ints(2, 3), ints(4, 5), kept))
    torch.testing.assert_close(run.step(parts, 2), want[[10, 13, 14]], atol=1e-4, rtol=0)
    # And each from what was kept last, on the way through a prompt and in decode.
    late = [Part(3, 11, 2), Part(2, 15, 1), Part(1, 14, 1)]
    run.begin(late, StateWrites(ints(3, 2, 1), ints(3, 2, 1), ints(7, 8, 6)))
    torch.testing.assert_close(run.step(late, 1), want[[12, 15, 14]], atol=1e-4, rtol=0)


class ApartRun(RecurrentRun):
    """Rows that each write wrong drafts into pages of their own."""

    shares = False


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", ["jamba", "bamba", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_row_goes_on_behind_its_last_right_draft(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kind: str, in_order: bool
) -> None:
    """In any order of the calls: that of the rows is for layers which count the tokens that they see."""
    path = checkpoint(kind)
    run = ApartRun(load(path), THREE)
    monkeypatch.setattr(run.model._states, "in_order", in_order)  # type: ignore[attr-defined]
    go_on_behind_drafts(path, run)


def go_on_behind_drafts(path: Path, run: ApartRun) -> None:
    """Rows of THREE with drafts, right ones and wrong ones; compared with the plain model of `path`."""
    ids = THREE[1]
    want = PlainModel(path).logits(ids)
    prompts = [Part(1, 0, 13), Part(2, 0, 9), Part(3, 0, 5)]
    run.begin(prompts, StateWrites(ints(1, 2, 3), ints(1, 2, 3), ints(0, 0, 0)))
    run.step(prompts, 3)
    # Their newest tokens, and three drafts, none and two; the last draft of row 1 is wrong, and both of row 3.
    parts = [Part(1, 13, 4), Part(2, 9, 1), Part(3, 5, 3)]
    counts, tokens = ints(3, 1, 1), [*ids[13:16], ids[16] + 1, ids[9], ids[5], ids[6] + 1, ids[7]]
    kept = StateWrites(ints(), ints(), ints(), Tracked(ints(0, 2), ints(15, 6), ints(7, 8)))
    got = verify(run, parts, tokens, kept)
    torch.testing.assert_close(got[[0, 1, 2, 4, 5]], want[[13, 14, 15, 9, 5]], atol=1e-4, rtol=0)
    run.states.judged(counts, Staging(CPU))
    after = [Part(1, 16, 1), Part(2, 10, 1), Part(3, 6, 1)]
    run.begin(after, None)
    torch.testing.assert_close(run.step(after, 0), want[[16, 10, 6]], atol=1e-4, rtol=0)
    # And from what was kept on the way.
    late = [Part(1, 15, 1), Part(3, 6, 1)]
    run.begin(late, StateWrites(ints(1, 3), ints(1, 3), ints(7, 8)))
    torch.testing.assert_close(run.step(late, 0), want[[15, 6]], atol=1e-4, rtol=0)


def verify(run: RecurrentRun, parts: list[Part], tokens: list[int], writes: StateWrites | None) -> torch.Tensor:
    """The logits of every token of a step that verifies drafts."""
    run.begin(parts, writes)
    batch = run.paged.batch(parts, len(parts), tokens)
    run.states.measured(batch.prefix_lens_host, batch.extend_lens_host, Staging(CPU))
    batch.verifies, batch.last_indices = True, torch.arange(len(tokens))
    return run.model.forward(batch)
