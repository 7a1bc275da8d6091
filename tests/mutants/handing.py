"""Mutants of what passes between step, completion and readers: memory, order, and who is told."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "tests/executor/test_step_memory.py::test_a_launched_step_keeps_what_its_copies_read"
REFS = "refs = (sampled, counted, vectors, inputs, published)"
TOLD = "tests/happens_before/test_handed_recorder.py::"

HANDING: tuple[Mutant, ...] = (
    Mutant(
        "waiter-counted-out-early",
        "a step does not overtake the one that the waiter is at",
        "core/executor/completion.py",
        "                self._deliver(launched)\n"
        "                with self._lock:\n"
        "                    self._pending -= 1\n",
        "                with self._lock:\n"
        "                    self._pending -= 1\n"
        "                self._deliver(launched)\n",
        "tests/executor/test_completion.py::test_a_step_that_is_done_does_not_overtake_the_one_that_the_waiter_is_at",
    ),
    Mutant(
        "copied-memory-let-go",
        "law 5: what copies read lives until they are done",
        "core/executor/step.py",
        REFS,
        "refs = ()",
        KEPT,
    ),
    Mutant(
        "copied-counters-let-go",
        "law 5: counters live until their copy is done",
        "core/executor/step.py",
        REFS,
        "refs = (sampled, vectors, inputs, published)",
        KEPT,
    ),
    Mutant(
        "copied-vectors-let-go",
        "law 5: vectors live until their copy is done",
        "core/executor/step.py",
        REFS,
        "refs = (sampled, counted, inputs, published)",
        KEPT,
    ),
    Mutant(
        "new-owner-not-forgotten",
        "a row's new owner finds nothing of the former one",
        "core/executor/step.py",
        "        state.future_map.forget(fresh)\n",
        "",
        "tests/executor/test_step_memory.py::test_a_new_owner_finds_nothing_of_the_former_one_in_its_row",
    ),
    Mutant(
        "companions-untold",
        "companions tell the recorder what they write",
        "core/executor/step.py",
        "            companion.recorder = self._recorder\n",
        "            pass\n",
        TOLD + "test_what_companions_write_is_told_by_its_name",
    ),
    Mutant(
        "published-before-written",
        "law 5: the publish event stands behind the lengths",
        "core/relay/future_map.py",
        "        self._buffers[NEW_SEQ_LENS.name].index_copy_(0, rows.view(-1), seq_lens.view(-1).to(torch.int64))\n"
        "        event = self._streams.new_event()\n"
        "        event.record(self._streams.forward)\n",
        "        event = self._streams.new_event()\n"
        "        event.record(self._streams.forward)\n"
        "        self._buffers[NEW_SEQ_LENS.name].index_copy_(0, rows.view(-1), seq_lens.view(-1).to(torch.int64))\n",
        TOLD + "test_the_publish_event_stands_behind_the_lengths",
    ),
)
