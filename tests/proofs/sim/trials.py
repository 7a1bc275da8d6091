"""Where the device's rows stand, and which drafts each step must verify: worked out again, in plain numbers.

A plan knows bounds; the device knows the length, which drafts wait behind the newest token, and where a request ends.
Both devices are held against what is said here, before a step and after it.
"""

from __future__ import annotations

from collections import deque

from core.batch.result import StepResult
from core.batch.schedule_batch import ScheduleBatch
from core.executor.speculator import MOST_UNHEARD
from core.types.io import FinishReason
from tests.proofs.sim.guesses import Guesser, Heard
from tests.proofs.sim.plain import Plain, reach
from tests.proofs.sim.reference import VOCAB
from tests.proofs.sim.scenario import Drafts
from tests.proofs.sim.story import Hits, Violation


class Trials:
    """Of one device that verifies drafts."""

    def __init__(self, seed: int, drafts: Drafts, hits: Hits) -> None:
        self.guesser = Guesser(seed, drafts.right)
        self._hits = hits
        self._due: deque[tuple[int, Heard]] = deque()
        """What the drafter has to hear, each behind the step that it comes of."""

    def begin(self, batch: ScheduleBatch, plain: Plain, lens: list[int]) -> None:
        """Enter into `plain` what the step has to compute. `lens`, by row: tokens that the device has."""
        assert batch.spec is not None, "drafts are on"
        # A step takes the drafts that are there: what it leaves is new, or nothing.
        waiting = {row: self.guesser.said.pop(row, []) for row in plain.rows}
        most, limits, chunks = batch.spec.drafts.tolist(), batch.spec.limits.tolist(), batch.num_extend
        for place, row in enumerate(plain.rows[chunks:], chunks):
            start, drafts, limit = lens[row], _legal(waiting[row]), limits[place - chunks]
            if start >= limit:
                raise Violation("beyond_end", f"step {plain.step_id} row {row} goes on at {start}, its end is {limit}")
            room = min(most[place - chunks], limit - start - 1)
            if room < min(len(drafts), most[place - chunks]):
                self._hits("draft_cut_at_limit")
            tried = plain.tried[place] = drafts[:room]
            plain.starts[place], plain.lens[place] = start, 1 + len(tried)
            plain.ends[place] = start + 1 + len(tried)
        slots, at = list[int](), 0
        firsts, counts = reach(batch)
        for start, length, first, count in zip(plain.starts, plain.lens, firsts.tolist(), counts.tolist(), strict=True):
            slots += plain.slots[at + start - first :][:length]
            at += count
        plain.slots = slots

    def judge(self, batch: ScheduleBatch, plain: Plain, result: StepResult) -> list[int]:
        """Tokens that each row has after the step. Its tokens say how far it came; the result must say the same, and
        the drafter hear it in its turn.
        """
        tokens, counts, ends = result.tokens.tolist(), [1] * len(plain.places), plain.ends
        if batch.verifies:
            ends = self._judge_drafts(batch, plain, result)
            counts = [end - start for start, end in zip(plain.starts, ends, strict=True)]
        elif result.accepted is not None:
            raise Violation("verdict", f"step {plain.step_id} verified nothing, and says {result.accepted}")
        if len(batch.fresh_rows):
            self._due.append((plain.step_id, "seats"))
        at = 0
        for place, count in zip(plain.places, counts, strict=True):
            self._due.append((plain.step_id, (plain.rows[place], ends[place], tokens[at : at + count])))
            at += count
        self._compare_heard(batch)
        return ends

    def _compare_heard(self, batch: ScheduleBatch) -> None:
        """The drafter hears all there is, in order: late where nothing was drafted behind it, if not too late."""
        assert batch.spec is not None, "drafts are on"
        for heard in self.guesser.heard:
            step_id, due = self._due.popleft() if self._due else (batch.step_id, None)
            if heard != due:
                raise Violation("drafter_told", f"step {step_id}: {heard}, not {due}")
        self.guesser.heard.clear()
        late = len({step_id for step_id, _ in self._due})
        if late and (late >= MOST_UNHEARD or (batch.spec.aim.most and len(batch.sample_rows))):
            raise Violation("drafter_told", f"step {batch.step_id}: {late} steps late, next is {self._due[0]}")
        if late:
            self._hits("drafter_told_late")

    def _judge_drafts(self, batch: ScheduleBatch, plain: Plain, result: StepResult) -> list[int]:
        assert batch.spec is not None, "it has drafts"
        accepted, tokens, at, ends = result.accepted, result.tokens.tolist(), 0, []
        told = None if accepted is None else (accepted.proposed.tolist(), accepted.planned.tolist())
        if accepted is None or told != ([*map(len, plain.tried)], [most + 1 for most in batch.spec.drafts.tolist()]):
            raise Violation("verdict", f"step {plain.step_id} verifies {plain.tried}, and says {accepted}")
        if int(accepted.counts.sum()) != len(tokens):
            raise Violation("verdict", f"step {plain.step_id} brings {len(tokens)} tokens, and says {accepted.counts}")
        for place, count in enumerate(accepted.counts.tolist()):
            got, tried = tokens[at : at + count], plain.tried[place]
            at += count
            right = got[:-1] == tried[: count - 1]
            if not right or (count <= len(tried) and got[-1] == tried[count - 1]):
                raise Violation("verdict", f"step {plain.step_id} row {plain.rows[place]}: {got} of {tried}")
            self._note(plain.rows[place], plain.starts[place], count, len(tried))
            ends.append(plain.starts[place] + count)
        return ends

    def _note(self, row: int, start: int, count: int, tried: int) -> None:
        if tried:
            self._hits("draft_rejected" if count == 1 else "draft_accepted" if count > tried else "draft_partly")
        answer, prompt = self.guesser.client(row).answer, self.guesser.client(row).req.prompt_len
        # Known to the device are `start` tokens and the newest; the last of the answer is among those it got now.
        if answer.reason is FinishReason.STOP and start + 1 < prompt + len(answer.tokens) < start + 1 + count:
            self._hits("draft_behind_stop")


def _legal(drafts: list[int]) -> list[int]:
    """Those before the first that is no token."""
    return drafts[: next((place for place, token in enumerate(drafts) if not 0 <= token < VOCAB), len(drafts))]
