"""Mutants of the pools and of the prefix cache: what a slot holds, what it costs, and who may still read a page."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KV = "core/memory/kv_pool.py"
STATES = "tests/memory/test_state_slots.py::"
SNAPSHOTS = "tests/memory/test_state_snapshots.py::"
SIZING = "tests/memory/test_window_sizing.py::"
RADIX = "tests/prefix/test_radix.py::"
MACHINE = "tests/types/test_machine.py::"

POOLING: tuple[Mutant, ...] = (
    Mutant(
        "values-are-not-stored",
        "what attention reads back are the keys and values of the token that was written there",
        KV,
        "            values.index_copy_(0, slots, v)",
        "            values.index_copy_(0, slots, torch.zeros_like(v))",
        "tests/memory/test_kv_pool.py::test_write_touches_its_slots_in_its_layer_only",
    ),
    Mutant(
        "padded-row-begins-a-state",
        "a request starts from a state of zeros, not from what padded rows left in slot 0",
        "core/memory/recurrent/state_pool.py",
        "            begun.masked_fill_((sources == 0).view(-1, *[1] * (begun.dim() - 1)), 0)\n",
        "",
        SNAPSHOTS + "test_sources_are_read_before_slots_are_written_and_padding_is_no_source_of_zeros",
    ),
    Mutant(
        "state-of-the-former-owner",
        "a request never goes on from the recurrent state of the one that had its slot before",
        "core/memory/recurrent/row_to_slot.py",
        "                self.states.start(slots, sources)\n",
        "",
        STATES + "test_a_fresh_slot_is_cleared_and_its_neighbours_are_not",
    ),
    Mutant(
        "snapshot-used-last-goes-first",
        "the states that give way are those that were not used for longest",
        "core/memory/recurrent/state_snapshots.py",
        "        self._slot_of.pop(page, None)\n        self._slot_of[page] = slot",
        "        self._slot_of[page] = slot",
        SNAPSHOTS + "test_snapshots_give_way_to_requests_the_least_recently_used_first",
    ),
    Mutant(
        "shared-snapshot-overwritten",
        "a state that others resume from is not overwritten by the request that made it",
        "core/memory/recurrent/state_snapshots.py",
        "return 0 if page in self._shared else self.drop(page)",
        "return self.drop(page)",
        SNAPSHOTS + "test_what_others_began_behind_is_not_overwritten_when_a_turn_is_over",
    ),
    Mutant(
        "window-table-keeps-first-entry",
        "windowed layers read the page that stands for a KV page now, not the one before",
        "core/memory/window/window_pool.py",
        "self.table[pages] = windows.to(torch.int32)",
        "self.table[pages] = torch.maximum(windows.to(torch.int32), self.table[pages])",
        "tests/memory/test_window_pages.py::test_the_device_translates_as_the_host_does_and_padding_to_padding",
    ),
    Mutant(
        "windows-not-charged-to-memory",
        "ordinary and window pool together take no more memory than there is",
        "core/memory/window/window_sizing.py",
        "left = max(0, budget - enough * window_bytes)",
        "left = budget",
        SIZING + "test_what_is_asked_for_is_taken",
    ),
    Mutant(
        "limit-of-the-outer-group-ignored",
        "a container stays within the limits of the groups around it",
        "core/machine.py",
        "for part in (inside, *inside.parents) if",
        "for part in (inside,) if",
        MACHINE + "test_the_group_around_is_a_limit_too_and_no_bound_is_none",
    ),
    Mutant(
        "page-with-two-places-unseen",
        "the integrity check sees a page that stands for two prefixes",
        "core/prefix/audit.py",
        "seen.isdisjoint(pages) and 0 not in pages",
        "0 not in pages",
        RADIX + "test_integrity_notices_a_page_in_two_places",
    ),
    Mutant(
        "locked-pages-count-as-room",
        "admission counts only pages that can be evicted",
        "core/prefix/base.py",
        "return self.cached_pages - self.locked_pages",
        "return self.cached_pages",
        "tests/prefix/test_contract.py::test_locked_prefixes_outlive_eviction_and_are_freed_once",
    ),
    Mutant(
        "lock-of-the-tail-only",
        "a request's whole prefix is kept while it reads it, not only the last part",
        "core/prefix/node.py",
        "            yield node\n            node = node.parent",
        "            yield node\n            node = None",
        RADIX + "test_a_handle_from_before_a_split_protects_exactly_its_prefix",
        dies_by="invariant",
    ),
    Mutant(
        "salt-names-a-group",
        "no client reaches the prompt of another request by naming its group as a salt",
        "core/prefix/none.py",
        'return group_salt(group_id) if group_id is not None else ""',
        "return group_salt(group_id) if group_id is not None else salt",
        "tests/prefix/test_none.py::test_a_clients_salt_cannot_name_a_group",
    ),
    Mutant(
        "unknown-cache-taken-for-radix",
        "a prefix cache that does not exist stops the start",
        "core/prefix/registry.py",
        "    if factory is None:\n"
        "        raise ConfigError(f\"prefix_cache must be one of {', '.join(PREFIX_CACHES)}; got {name!r}\")\n",
        "    if factory is None:\n        factory = RadixCache\n",
        "tests/prefix/test_contract.py::test_the_registry_knows_exactly_what_the_flag_takes",
    ),
    Mutant(
        "latents-charged-twice",
        "values that are part of their keys take no memory of their own",
        "core/memory/kv_pool.py",
        "(0 if self.v_in_k else self.v_dim)",
        "self.v_dim",
        "tests/memory/test_kv_pool.py::test_values_that_are_the_beginnings_of_their_keys_are_held_once",
    ),
    Mutant(
        "memory-of-other-pools-taken",
        "memory that was promised to other pools is left to them",
        "core/memory/sizing.py",
        "max(0, free_bytes(device) - reserved_bytes) // bytes_per_token",
        "free_bytes(device) // bytes_per_token",
        "tests/memory/test_sizing.py::test_memory_that_other_pools_were_promised_is_left_to_them",
    ),
    Mutant(
        "windows-take-what-is-promised",
        "a model with windows leaves other pools what they were promised",
        "core/memory/window/window_sizing.py",
        "max(0, free_bytes(device) - reserved_bytes)",
        "free_bytes(device)",
        "tests/memory/test_sizing.py::test_a_divided_pool_leaves_it_too",
    ),
    Mutant(
        "encoder-tokens-for-bytes",
        "what is asked for in encoder tokens is reserved in bytes",
        "core/engine/build_pools.py",
        "CrossSize(limit, 0, asked * each)",
        "CrossSize(limit, 0, asked)",
        "tests/engine/test_cross_pools.py::test_encoder_tokens_are_charged_in_bytes_by_token_or_as_they_are_asked_for",
    ),
    Mutant(
        "cross-page-for-every-token",
        "encoder tokens that are asked for fill whole pages, not a page each",
        "core/engine/build_pools.py",
        "asked // memory.page_size",
        "asked",
        "tests/engine/test_cross_pools.py::test_there_are_as_many_pages_as_the_ordinary_pool_has_or_as_the_tokens_fill",
    ),
    Mutant(
        "last-word-forced-first",
        "an encoder-decoder begins and ends as its checkpoint says",
        "core/engine/input_processor.py",
        '"forced_last": self.spec.forced_last',
        '"forced_last": self.spec.forced_first',
        "tests/engine/test_cross_pools.py::test_what_a_client_sends_goes_to_the_encoder_and_the_decoder_begins_as_its_checkpoint_says",
    ),
    Mutant(
        "cache-that-was-switched-off",
        "nothing outlives a request where the prefix cache is switched off",
        "core/prefix/registry.py",
        '    "none": NoPrefixCache,',
        '    "none": RadixCache,',
        "tests/prefix/test_contract.py::test_what_ended_is_kept_by_the_cache_that_was_asked_for",
    ),
    Mutant(
        "room-for-loaded-adapters-twice",
        "adapters that are loaded already are not reserved for once more",
        "core/engine/adapters/build.py",
        "return config.max_bytes - table.used_bytes if",
        "return config.max_bytes if",
        "tests/engine/test_adapters.py::test_room_for_adapters_to_come_is_kept_on_the_device",
    ),
    Mutant(
        "unwritten-row-reads-as-a-token",
        "a row that was not written since it was read is known by its value",
        "core/relay/payload.py",
        "torch.int64, fill=-1)",
        "torch.int64, fill=0)",
        "tests/relay/test_future_map.py::test_count_goes_on_with_a_legal_token_and_counts",
    ),
)
