"""Mutants of the FutureMap, input resolution and device checks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RELAY = "tests/relay/test_future_map.py::"
RESOLVE = "tests/relay/test_resolve.py::"

RELAYING: tuple[Mutant, ...] = (
    Mutant(
        "read-does-not-consume",
        "law 12: a second read without a write is seen",
        "core/device/checks.py",
        "    buffer.index_fill_(0, rows, -1)\n",
        "",
        RELAY + "test_trap_stops_at_an_unwritten_read_and_says_why",
    ),
    Mutant(
        "padding-row-consumed",
        "law 6: padded rows stay readable",
        "core/device/checks.py",
        "    buffer[:1].zero_()\n",
        "",
        RELAY + "test_padding_row_is_exempt_and_stays_readable",
    ),
    Mutant(
        "forget-does-nothing",
        "a new owner's early read is seen",
        "core/relay/future_map.py",
        "            buffer.index_fill_(0, rows, self._columns[name].fill)\n",
        "            pass\n",
        RELAY + "test_forget_makes_the_next_owners_early_read_visible",
    ),
    Mutant(
        "one-event-for-all-steps",
        "law 5: a fresh event per step",
        "core/relay/future_map.py",
        "        event = self._streams.new_event()\n",
        "        event = self.__dict__.setdefault('_event', self._streams.new_event())\n",
        RELAY + "test_every_publish_has_its_own_event",
    ),
    Mutant(
        "tails-before-chunks",
        "mixed input ids are prompt chunks, then decode tails",
        "core/relay/resolve.py",
        "torch.cat([ids, future_map.gather(decode_rows, decode_lens)])",
        "torch.cat([future_map.gather(decode_rows, decode_lens), ids])",
        RESOLVE + "test_mixed_puts_prompt_chunks_before_decode_tails",
    ),
    Mutant(
        "staging-cleared-early",
        "a failed resolve leaves the staging whole",
        "core/relay/resolve.py",
        "    prompt = staging.prefill_ids_cpu\n",
        "    prompt, staging.prefill_ids_cpu = staging.prefill_ids_cpu, None\n",
        RESOLVE + "test_wrong_length_is_caught_and_staging_kept",
    ),
    Mutant(
        "length-check-inert",
        "published lengths are compared with the plan",
        "core/device/checks.py",
        "torch.ne(actual, expected, out=violated)",
        "torch.ne(actual, actual, out=violated)",
        RELAY + "test_published_length_must_be_what_the_plan_assumes",
    ),
    Mutant(
        "trap-without-a-message",
        "law 12: an assertion without a message is dropped by compilers",
        "core/device/checks.py",
        '(values >= 0).all(), "relay_unwritten_read: a row was read without a write since its last read"',
        "(values >= 0).all()",
        RELAY + "test_trap_stops_at_an_unwritten_read_and_says_why",
    ),
)
