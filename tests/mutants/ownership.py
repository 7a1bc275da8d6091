"""Mutants of rows, pages and cached prefixes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCHEDULER = "tests/scheduler/test_scheduler.py::"
MEMORY = "tests/memory/test_request_memory.py::"
RELAY = "tests/relay/test_future_map.py::"

OWNERSHIP: tuple[Mutant, ...] = (
    Mutant(
        "skip-generation-check",
        "law 1: results of a former owner are dropped",
        "core/scheduler/result_processor.py",
        "current = self._memory.rows.is_current(result.rows, result.generations)\n        self._tally",
        "current = np.ones(len(result.rows), np.bool_)\n        self._tally",
        SCHEDULER + "test_row_reused_while_the_old_owner_is_in_flight",
        dies_by="invariant",
    ),
    Mutant(
        "generation-survives-free",
        "law 1: the generation ends when the row is freed",
        "core/memory/rows.py",
        "self.generations[row] += 1",
        "self.generations[row] += 0",
        "tests/memory/test_rows.py::test_free_ends_the_generation_at_once",
    ),
    Mutant(
        "hand-out-row-0",
        "law 6: row 0 is padding",
        "core/memory/rows.py",
        "list(range(size, 0, -1))",
        "list(range(size - 1, -1, -1))",
        "tests/memory/test_rows.py::test_hands_out_every_row_but_padding_and_then_none",
        dies_by="invariant",
    ),
    Mutant(
        "hand-out-page-0",
        "law 6: page 0 is padding",
        "core/memory/kv_allocator.py",
        "np.arange(num_pages, 0, -1, dtype=np.int64)",
        "np.arange(num_pages - 1, -1, -1, dtype=np.int64)",
        "tests/memory/test_kv_allocator.py::test_alloc_is_atomic_and_never_gives_page_zero",
    ),
    Mutant(
        "row-buffer-of-the-wrong-length",
        "law 6: every row-indexed buffer has the table's length",
        "core/memory/req_to_token_pool.py",
        "torch.full((self.num_rows, *tail)",
        "torch.full((self.size, *tail)",
        RELAY + "test_last_row_is_inside_and_buffers_follow_the_table",
    ),
    Mutant(
        "free-pages-twice",
        "a page is freed once",
        "core/memory/request_memory.py",
        "        self._free(left)\n",
        "        self._free(left)\n        self._free(left)\n",
        MEMORY + "test_stats_add_up",
        dies_by="invariant",
    ),
    Mutant(
        "leak-partial-page",
        "a released row's last, partial page goes back",
        "core/memory/request_memory.py",
        "        self._free(left)\n",
        "        self._free(left[:-1])\n",
        MEMORY + "test_stats_add_up",
    ),
    Mutant(
        "off-by-one-page-need",
        "a row has a page before its token is written",
        "core/memory/request_memory.py",
        "positions >= self._count[rows] * self.page_size",
        "positions > self._count[rows] * self.page_size",
        SCHEDULER + "test_every_request_gets_its_own_tokens",
    ),
    Mutant(
        "no-lock-on-admission",
        "a matched prefix is locked before anything can evict it",
        "core/memory/request_memory.py",
        "        self.cache.lock(match.node)\n        pages = None\n",
        "        pages = None\n",
        MEMORY + "test_offered_pages_are_shared_while_their_owner_runs",
        dies_by="invariant",
    ),
    Mutant(
        "prefix-locked-beside-own-copy",
        "a prefix is never held twice by one request",
        "core/memory/request_memory.py",
        "if tokens <= cached or self.cache.peek(ids, tokens, self._salts[row]) > cached:",
        "if tokens <= cached:",
        MEMORY + "test_a_prefix_computed_twice_is_kept_once_and_never_locked_twice",
        dies_by="invariant",
    ),
    Mutant(
        "match-the-whole-prompt",
        "one token is always left to compute",
        "core/memory/request_memory.py",
        "limit = len(ids) - 1 if reuse else 0",
        "limit = len(ids) if reuse else 0",
        MEMORY + "test_one_token_is_always_left_to_compute",
    ),
    Mutant(
        "ask-for-the-whole-prompt",
        "what an admission would need is asked as the admission itself asks",
        "core/memory/request_memory.py",
        "self._match(ids, len(ids) - 1 if reuse else 0, salt)",
        "self._match(ids, len(ids) if reuse else 0, salt)",
        MEMORY + "test_the_token_left_to_compute_is_asked_room_for",
    ),
    Mutant(
        "salt-ignored",
        "tenants never share a cached prefix",
        "core/memory/request_memory.py",
        "self._salts[row] = salt",
        'self._salts[row] = ""',
        SCHEDULER + "test_finished_prompt_is_found_again_and_salt_separates",
    ),
    Mutant(
        "states-of-others-overwritten",
        "a request does not overwrite the state that another began behind",
        "core/memory/recurrent/state_slots.py",
        "self._snapshots.drop_own(turns",
        "self._snapshots.drop(turns",
        "tests/memory/test_state_snapshots.py::test_what_others_began_behind_is_not_overwritten_when_a_turn_is_over",
    ),
)
