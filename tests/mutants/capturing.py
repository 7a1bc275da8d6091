"""Mutants of captured decode steps: padding, fixed addresses, and what comes before and after a replay."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GRAPHS = "core/executor/decode_graphs.py"
ROOM = "tests/executor/test_decode_graphs.py::"

CAPTURING: tuple[Mutant, ...] = (
    Mutant(
        "padded-rows-are-stale",
        "law 6: padded graph rows are zeroed on every replay",
        "core/device/static_block.py",
        "        used.copy_(self._staging.pinned(arrays), non_blocking=True)\n",
        "        for part, array in zip(used.split(lengths), arrays):\n"
        "            if array.any():\n"
        "                part.copy_(torch.from_numpy(array))\n",
        ROOM + "test_d08_padded_rows_write_slot_0_and_nothing_of_rows_that_left",
    ),
    Mutant(
        "graph-inputs-move",
        "captured work reads memory that stays where it is",
        GRAPHS,
        "        rows, lens, slots, before = self.block.memory[: SECTIONS * size].split(size)\n",
        "        rows, lens, slots, before = self.block.memory[: SECTIONS * size].clone().split(size)\n",
        ROOM + "test_replays_equal_eager_steps_in_batches_that_grow_and_shrink",
    ),
    Mutant(
        "logits-in-graph-memory",
        "what a graph allocates lasts until the next replay at most",
        GRAPHS,
        "            logits.copy_(state.model.forward(batch))\n",
        "            self.logits = state.model.forward(batch)\n",
        ROOM + "test_replays_equal_eager_steps_in_batches_that_grow_and_shrink",
    ),
    Mutant(
        "tokens-resolved-at-capture",
        "law 7: a replay takes its tokens from the FutureMap",
        GRAPHS,
        "        def work() -> None:\n            ids = state.future_map.gather(rows, before)\n",
        "        ids = state.future_map.gather(rows, before)\n\n        def work() -> None:\n",
        ROOM + "test_replays_equal_eager_steps_in_batches_that_grow_and_shrink",
    ),
    Mutant(
        "plan-not-written-before-a-replay",
        "law 2: what the scheduler decided is device state before the step reads it",
        "core/executor/step.py",
        "            self._apply(batch, inputs.rows, inputs.fresh, inputs.table)\n",
        "",
        ROOM + "test_the_inputs_of_a_new_page_and_a_new_owner_come_with_the_step",
    ),
)
