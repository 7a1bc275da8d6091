"""Mutants of adapters that come and go."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TABLE = "core/engine/adapters/table.py"
BOOKS = "tests/engine/test_adapter_table.py::"
SERVED = "tests/equivalence/test_adapters_grpc.py::"

ADAPTING: tuple[Mutant, ...] = (
    Mutant(
        "prefixes-shared-by-adapters",
        "keys and values of one load are no prefix for another",
        TABLE,
        'return f"{slot}\\0{salt}" if self.enabled',
        'return f"{slot > 0}\\0{salt}" if self.enabled',
        SERVED + "test_load_generate_unload_and_other_weights_under_the_name",
    ),
    Mutant(
        "adapter-slot-used-twice",
        "a slot's number is never used twice",
        TABLE,
        "self._last_slot += 1",
        "self._last_slot = max(self._by_slot, default=NONE_SLOT) + 1",
        BOOKS + "test_the_device_is_told_in_an_order_that_keeps_to_the_bound",
    ),
    Mutant(
        "adapter-emptied-while-in-use",
        "an unloaded adapter stays for those who use it",
        TABLE,
        "        if not loaded.users:\n            self._free(loaded)\n        return loaded.users",
        "        users, loaded.users = loaded.users, 0\n        self._free(loaded)\n        return users",
        BOOKS + "test_an_unloaded_adapter_stays_for_those_who_use_it",
    ),
    Mutant(
        "adapter-never-emptied",
        "an unloaded adapter goes with its last request",
        TABLE,
        "if loaded.unloading and not loaded.users:",
        "if loaded.unloading and loaded.users < 0:",
        BOOKS + "test_an_unloaded_adapter_stays_for_those_who_use_it",
    ),
    Mutant(
        "adapter-filled-before-emptied",
        "the device never holds more adapters than it may",
        TABLE,
        "key=lambda write: write.adapter is not None",
        "key=lambda write: write.adapter is None",
        BOOKS + "test_storm",
    ),
    Mutant(
        "pinned-adapter-evicted",
        "a pinned adapter is never evicted",
        TABLE,
        "not (self.users or self.pinned or self.unloading)",
        "not (self.users or self.unloading)",
        BOOKS + "test_what_is_used_or_pinned_stays_and_then_nobody_goes",
    ),
    Mutant(
        "adapter-in-use-evicted",
        "an adapter that a request uses is never evicted",
        TABLE,
        "not (self.users or self.pinned or self.unloading)",
        "not (self.pinned or self.unloading)",
        BOOKS + "test_what_is_used_or_pinned_stays_and_then_nobody_goes",
        dies_by="invariant",
    ),
    Mutant(
        "first-loaded-adapter-evicted",
        "the least recently used goes first",
        TABLE,
        "key=lambda loaded: loaded.order",
        "key=lambda loaded: loaded.slot",
        BOOKS + "test_the_least_recently_used_goes_first_and_no_more_than_needed",
    ),
    Mutant(
        "adapter-not-given-back",
        "a request that ends, however it ends, gives its adapter back",
        "core/engine/async_engine.py",
        "self._adapters.table.release(stream.reqs[0].adapter_slot)",
        "self._adapters.table.slot(str())",
        SERVED + "test_a_cancelled_request_gives_its_adapter_back",
    ),
    Mutant(
        "empty-adapter-slot-served",
        "a step names only slots that are filled",
        "core/models/lora/slots.py",
        'check("adapter_slot_filled", slot in self._filled,',
        'check("adapter_slot_filled", slot > 0,',
        "tests/models/lora/test_adapters.py::test_a_step_with_an_empty_slot_does_not_run",
    ),
    Mutant(
        "recurrent-parts-taken-for-the-whole",
        "an adapter's places count from where the layer's part of the packed row begins",
        "core/models/lora/slots.py",
        "return start, start + count",
        "return 0, count",
        "tests/equivalence/test_adapters_architectures.py::test_other_kinds_of_models_equal_peft[lfm2]",
    ),
    Mutant(
        "adapter-write-lost",
        "what the books changed, the next step brings to the device",
        "core/engine/adapters/rows.py",
        "if groups or slots else None",
        "if groups else None",
        "tests/sim/test_sim.py::test_the_corpus_comes_first",
    ),
    Mutant(
        "load-outlives-the-drain",
        "a load that ends while the server drains is refused",
        "core/engine/adapters/loader.py",
        "            still_wanted()\n",
        "",
        SERVED + "test_a_load_that_ends_in_a_drain_is_refused",
    ),
    Mutant(
        "cancelled-load-keeps-its-name",
        "a load that was cancelled leaves nothing behind",
        "core/engine/adapters/loader.py",
        "                self._loading.discard(name)\n",
        "                pass\n",
        SERVED + "test_streams_go_on_while_an_adapter_is_read",
    ),
    Mutant(
        "adapter-read-on-the-loop",
        "streams go on while an adapter is read",
        "core/engine/adapters/loader.py",
        "await self._workers.run(self._read_below, path or name)",
        "self._read_below(path or name)",
        SERVED + "test_streams_go_on_while_an_adapter_is_read",
    ),
    Mutant(
        "linked-adapter-file-followed",
        "no link below the root leads out of it",
        "core/models/lora/directory.py",
        "for each in inside)",
        "for each in inside[:1])",
        "tests/models/lora/test_directory.py::test_what_leads_outside_looks_like_what_is_not_there",
    ),
    Mutant(
        "embedding-salt-reaches-adapters",
        "no salt of a client reaches another adapter's prefixes",
        "core/engine/input_processor.py",
        "own = self.adapters.salt(slot, request.cache_salt)\n        return [",
        "own = request.cache_salt\n        return [",
        "tests/equivalence/test_adapters_refused_grpc.py::"
        "test_no_salt_of_an_embedding_reaches_the_prefixes_of_an_adapter",
    ),
)
