"""Mutants of encoder-decoders: cross pages, encoder inputs, and what the checkpoint forces."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANS = "tests/scheduler/test_encoder_inputs.py::"
POOL = "tests/memory/test_cross_pages.py::"
DOOR = "tests/engine/test_encoder_decoder.py::"

ENCODERS: tuple[Mutant, ...] = (
    Mutant(
        "encoder-length-forgotten",
        "cross pages are charged by the encoder's length",
        "core/scheduler/lifecycle.py",
        "encoder_tokens=req.encoder_len",
        "encoder_tokens=1",
        PLANS + "test_every_request_hears_its_own_input",
    ),
    Mutant(
        "cross-pages-kept",
        "an ended request gives its cross pages back",
        "core/memory/cross_pages.py",
        "        self.allocator.free(self._pages[row])\n",
        "",
        PLANS + "test_ends_at_any_time_free_both_pools",
    ),
    Mutant(
        "cross-pool-never-full",
        "nobody is admitted without room for the whole input",
        "core/memory/cross_pages.py",
        "return self.allocator.pages_for(encoder_tokens) <= self.allocator.available",
        "return True",
        PLANS + "test_a_full_pool_of_cross_pages_makes_wait_and_retracts_nobody",
    ),
    Mutant(
        "cross-entry-unchecked",
        "an input that no empty pool holds is refused at entry",
        "core/memory/cross_pages.py",
        "return self.allocator.pages_for(encoder_tokens) <= self.allocator.num_pages",
        "return True",
        POOL + "test_entry_asks_each_pool_for_its_own_tokens",
    ),
    Mutant(
        "cross-input-without-its-end",
        "a decoder token sees all of its input",
        "core/memory/cross_pages.py",
        "lens - 1, extend_lens",
        "lens - 2, extend_lens",
        POOL + "test_the_device_agrees_with_a_dictionary",
    ),
    Mutant(
        "cross-slots-by-row",
        "slots come in the order in which inputs are staged",
        "core/memory/cross_pages.py",
        "fresh = [row for row in rows.tolist() if row in self._fresh]",
        "fresh = sorted(self._fresh)",
        PLANS + "test_every_request_hears_its_own_input",
    ),
    Mutant(
        "encoder-ids-backwards",
        "inputs are staged in batch order",
        "core/batch/build.py",
        "[s.encoder_ids for s in plan.segments if",
        "[s.encoder_ids for s in reversed(plan.segments) if",
        PLANS + "test_every_request_hears_its_own_input",
    ),
    Mutant(
        "cross-ended-before-its-step",
        "a request that ended before its step is not encoded",
        "core/memory/cross_pages.py",
        "        self._fresh.discard(row)\n",
        "",
        POOL + "test_the_device_agrees_with_a_dictionary",
    ),
    Mutant(
        "encoder-shares-a-full-step",
        "an input beyond the budget is the only prefill of its step",
        "core/scheduler/prefill_adder.py",
        "(segments and req.encoder_len >= budget)",
        "False",
        PLANS + "test_inputs_share_the_budget_with_chunks_and_one_that_is_longer_goes_alone",
    ),
    Mutant(
        "encoder-costs-nothing",
        "encoder tokens count against the budget",
        "core/scheduler/prefill_adder.py",
        "budget -= segments[-1].cost",
        "budget -= segments[-1].length",
        PLANS + "test_inputs_share_the_budget_with_chunks_and_one_that_is_longer_goes_alone",
    ),
    Mutant(
        "encoder-staging-kept",
        "staged encoder ids are consumed once",
        "core/relay/resolve.py",
        "    staging.encoder_ids_cpu = None\n",
        "",
        "tests/relay/test_resolve.py::test_encoder_ids_stay_apart_and_are_consumed",
    ),
    Mutant(
        "encoder-ids-into-the-decoder",
        "what the encoder reads never reaches the decoder",
        "core/relay/resolve.py",
        "        inputs.encoder_ids = encoder.to(decode_rows.device, non_blocking=True)\n",
        "        inputs.encoder_ids = encoder.to(decode_rows.device, non_blocking=True)\n        ids[0] = encoder[0]\n",
        DOOR + "test_encoder_ids_never_reach_the_decoder",
    ),
    Mutant(
        "cross-table-unwritten",
        "the device learns where an input is kept",
        "core/memory/cross_pool.py",
        "self.table[written, places] = self.input_slots.to(torch.int32)",
        "pass",
        POOL + "test_the_device_agrees_with_a_dictionary",
    ),
    Mutant(
        "forced-end-too-late",
        "the output that reaches its limit ends as the checkpoint says",
        "core/scheduler/sampling_table.py",
        "last = req.max_new_tokens - 1",
        "last = req.max_new_tokens",
        DOOR + "test_forced_tokens_come_first_and_last_whatever_is_asked",
    ),
    Mutant(
        "suppressed-token-said",
        "suppressed tokens are never said",
        "core/models/encoder_decoder_backend.py",
        "loaded.silence(never, device)",
        "pass",
        DOOR + "test_tokens_that_generate_suppresses_are_never_said",
    ),
    Mutant(
        "encoder-padding-attended",
        "padding of a batch of inputs is hidden",
        "core/models/encoder_batches.py",
        "attention_mask=mask).last",
        "attention_mask=None).last",
        "tests/models/test_encoder_batches.py::test_together_equals_alone",
    ),
    Mutant(
        "input-too-long-for-the-pool",
        "an input that the server cannot hold is refused by field",
        "core/engine/input_processor.py",
        "not self._memory.fits_alone(1, len(prompt))",
        "False",
        DOOR + "test_an_input_that_cannot_be_served_is_refused_by_field",
    ),
)
