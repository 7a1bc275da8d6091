"""Mutants of the gateway's dialects and of what they know of the prefix cache."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GATEWAY = "tests/gateway/"
REMOTE = GATEWAY + "test_remote_prefixes.py::"
WATCH = "tests/engine/test_prefixes.py::"

GATEWAYS: tuple[Mutant, ...] = (
    Mutant(
        "abort-by-anyone",
        "only who started a request ends it, whatever service is asked",
        "service/tenant_ids.py",
        'return request_id if caller is None else f"{caller}\\0{request_id}"',
        "return request_id",
        GATEWAY + "test_generate.py::test_only_who_started_a_request_ends_it_whatever_service_is_asked",
    ),
    Mutant(
        "chunks-cumulative",
        "a chunk has only what is new",
        "service/gateway/outputs.py",
        "Piece(self._index, delta.token_ids,",
        "Piece(self._index, tuple(self._ids),",
        GATEWAY + "test_generate.py::test_a_stream_has_new_ids_in_chunks_and_everything_once_more_at_the_end",
    ),
    Mutant(
        "choices-as-they-come",
        "answers without chunks have their choices in order",
        "service/gateway/generation.py",
        "for index in sorted(self._wholes)",
        "for index in self._wholes",
        GATEWAY + "test_generate.py::test_wholes_without_chunks_come_in_their_order",
    ),
    Mutant(
        "unset-is-zero",
        "a zero without presence switches an option off",
        "service/gateway/reading.py",
        '    ("top_p", 0): 1.0,\n',
        "",
        GATEWAY + "test_reading.py::test_zeros_without_presence_switch_options_off",
    ),
    Mutant(
        "own-names-kept",
        "a refusal names the field as its client knows it",
        "service/gateway/servicer.py",
        "raise renamed(error, self.dialect.fields) from None",
        "raise",
        GATEWAY + "test_reading.py::test_a_bad_field_is_refused_by_its_name",
    ),
    Mutant(
        "eviction-untold",
        "who follows the prefix cache is told of what leaves it",
        "core/prefix/radix.py",
        "            self._observer.removed(node.pages)\n",
        "            pass\n",
        "tests/prefix/test_observer.py::test_the_changes_add_up_to_the_contents_at_every_moment",
    ),
    Mutant(
        "tenants-prompts-told",
        "who follows the prefix cache sees its own namespace only",
        "core/engine/prefixes.py",
        "if followed == salt:",
        "if True:",
        WATCH + "test_a_watch_sees_its_own_namespace_first_whole_and_then_each_change",
    ),
    Mutant(
        "unread-changes-unbounded",
        "who reads too slowly is dropped",
        "core/engine/prefixes.py",
        "if self._unread > self._max_unread:",
        "if False:",
        WATCH + "test_a_watch_that_is_not_read_is_over_and_the_others_go_on",
    ),
    Mutant(
        "observer-left-behind",
        "nobody watching costs nothing",
        "core/engine/prefixes.py",
        "            self._memory.cache.observe(None)\n",
        "            pass\n",
        WATCH + "test_nobody_watching_means_nobody_is_told",
    ),
    Mutant(
        "event-numbers-skip",
        "batches of events are numbered without gaps",
        "service/gateway/kv_events.py",
        "self._next += 1",
        "self._next += 2",
        GATEWAY + "test_kv_events.py::test_large_states_come_in_chunks_with_their_parents",
    ),
    Mutant(
        "subscribers-hold-up-the-end",
        "a closing server ends the subscriptions first",
        "service/server/server.py",
        "            self._gateway.close()\n",
        "            pass\n",
        GATEWAY + "test_kv_events.py::test_a_client_that_goes_is_forgotten_and_a_closing_server_ends_the_others",
    ),
    Mutant(
        "told-and-forgotten",
        "a change that a front end's reader had no patience for is told at its next call",
        "service/frontends/remote_prefixes.py",
        "        plain = await asyncio.shield(self._asked)\n        self._asked = None\n",
        "        asked, self._asked = self._asked, None\n        plain = await asyncio.shield(asked)\n",
        REMOTE + "test_changes_outlast_the_patience_of_their_reader",
    ),
    Mutant(
        "watch-of-the-dead",
        "a front end that goes leaves no watch behind",
        "service/frontends/host.py",
        "        self._prefixes.close(number)\n",
        "",
        REMOTE + "test_a_front_end_that_dies_takes_its_watches_along",
    ),
    Mutant(
        "pieces-overlap",
        "each record of a state is told once",
        "service/frontends/prefix_watches.py",
        ".contents[start:]",
        ".contents[max(0, start - 1) :]",
        REMOTE + "test_a_state_comes_in_pieces_and_is_whole",
    ),
)
