"""Mutants of the order between streams and threads: laws 4 and 5. Where data survives by luck, the recorder tells."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STEP = "core/executor/step.py"
STEP_KINDS = "tests/happens_before/test_step_kinds.py::test_no_race_and_the_tokens_of_a_plain_run"
THREADS = "tests/happens_before/test_threads.py::test_threads_and_streams_leave_nothing_unordered"

ORDERING: tuple[Mutant, ...] = (
    Mutant(
        "event-wait-dropped",
        "law 5: the copy stream waits for the publish event before it reads what was sampled",
        STEP,
        "            published.wait(streams.copy)\n",
        "",
        STEP_KINDS,
    ),
    Mutant(
        "emit-before-copy-done",
        "law 5: nobody reads a result before its copy is done",
        "core/executor/launched_step.py",
        "        self.copy_done.synchronize()\n",
        "",
        STEP_KINDS,
    ),
    Mutant(
        "publish-before-sampling-ends",
        "law 5: the publish event stands behind everything that the copy stream reads",
        STEP,
        "published = self._relay(batch, inputs, sampled)",
        "published = state.streams.new_event()\n            self._relay(batch, inputs, sampled)",
        STEP_KINDS,
    ),
    Mutant(
        "stash-on-the-copy-stream",
        "law 2: the relay is written on the forward stream only",
        STEP,
        "            future_map.stash(rows, RelayPayload(sampled.tokens))\n",
        "            with self._state.streams.on_copy():\n"
        "                future_map.stash(rows, RelayPayload(sampled.tokens))\n",
        STEP_KINDS,
    ),
    Mutant(
        "table-writes-dropped",
        "one step in order: what the scheduler decided is applied before anything is read",
        STEP,
        "        if len(batch.table_writes.rows):\n            state.pool.write(*table)\n",
        "",
        "tests/happens_before/test_step_kinds.py::test_a_plain_run_is_right",
    ),
    Mutant(
        "live-counters-copied",
        "the copy stream never reads what the next step writes",
        "core/device/checks.py",
        "else torch.cat([self.counters, violated])",
        "else self.counters if not len(violated) else torch.cat([self.counters, violated])",
        STEP_KINDS,
    ),
    Mutant(
        "pinned-buffer-reused-early",
        "staging memory is not filled again under a running copy",
        "core/device/staging.py",
        "flat = torch.empty(sum(len(part) for part in ids), dtype=torch.int64, pin_memory=self.pins)",
        'kept = self.__dict__.setdefault("kept", torch.empty(1 << 16, dtype=torch.int64, pin_memory=self.pins))\n'
        "        flat = kept[: sum(len(part) for part in ids)]",
        STEP_KINDS,
    ),
    Mutant(
        "pools-not-waited-for",
        "pools filled on the default stream are ready before the forward stream uses them",
        STEP,
        "        state.streams.synchronize()\n",
        "",
        STEP_KINDS,
    ),
)
