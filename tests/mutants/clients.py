"""Mutants of the client, of front ends between it and the engine, and of what lets calls in."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVICE = "tests/service/"
ADMISSION = SERVICE + "test_admission.py::"
ADAPTERS = SERVICE + "test_adapters.py::"
GROUP = SERVICE + "test_front_end_group.py::"
PAIR = SERVICE + "test_front_end_pair.py::"
WIRE = SERVICE + "test_frontend_wire.py::"
RESUMED = SERVICE + "test_resumed_call.py::"

CLIENTS: tuple[Mutant, ...] = (
    Mutant(
        "adapters-without-a-token",
        "calls of the adapter client carry the client's token",
        "service/client/adapters.py",
        "return await method(request, metadata=self._metadata)",
        "return await method(request)",
        ADAPTERS + "test_a_call_is_made_with_the_clients_token",
    ),
    Mutant(
        "unloading-shown-as-ready",
        "an adapter that waits for its last request is not shown as one that serves",
        "service/wire/adapters.py",
        "pb.ADAPTER_STATE_UNLOADING if info.unloading else pb.ADAPTER_STATE_READY",
        "pb.ADAPTER_STATE_READY",
        ADAPTERS + "test_one_that_waits_for_its_last_request_is_told_from_one_that_serves",
    ),
    Mutant(
        "a-call-too-many",
        "at most so many calls are open at once",
        "service/limits/admission.py",
        "return self._taken + wanted > self._limit",
        "return self._taken + wanted > self._limit + 1",
        ADMISSION + "test_the_wait_is_bounded_and_the_refusal_says_when_to_come_back",
    ),
    Mutant(
        "place-of-a-refused-call",
        "a call that the rate refuses gives its place back",
        "service/limits/admission.py",
        "                self._slots.release(places)\n                raise",
        "                raise",
        ADMISSION + "test_a_rate_below_one_per_second_is_not_rounded_up",
    ),
    Mutant(
        "whole-seconds-only",
        "a client is told to the fraction of a second when to come back",
        "service/client/errors.py",
        " + retry.retry_delay.nanos / 1e9",
        "",
        ADMISSION + "test_over_the_wire_both_limits_are_resource_exhausted_with_pushback",
    ),
    Mutant(
        "overload-not-retried",
        "a client comes back by itself when a server that is full says so",
        "service/client/client.py",
        '"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]',
        '"retryableStatusCodes": ["UNAVAILABLE"]',
        SERVICE + "test_client.py::test_overload_is_retried_when_the_server_says_when",
    ),
    Mutant(
        "come-back-after-nothing",
        "a client that retries overload by its own policy is told a time after which it does come back",
        "service/rpc/status.py",
        "max(LEAST_PUSHBACK_MILLIS, ",
        "max(0, ",
        SERVICE + "test_client.py::test_a_client_with_a_policy_of_its_own_is_not_left_waiting",
    ),
    Mutant(
        "place-named-twice",
        "an Attach that names an output twice is refused, since only one place can be meant",
        "service/wire/attach.py",
        "        seen.add(each.index)\n",
        "",
        SERVICE + "test_convert_attach.py::test_every_bad_field_is_named_at_once",
    ),
    Mutant(
        "resumes-by-characters",
        "a broken stream goes on behind the bytes of text that have come",
        "service/client/resumed_call.py",
        "len(response.delta.text.encode())",
        "len(response.delta.text)",
        RESUMED + "test_each_attach_names_the_tokens_and_bytes_that_have_come",
    ),
    Mutant(
        "gives-up-though-it-gets-on",
        "a stream that each connection brings further is not given up",
        "service/client/resumed_call.py",
        "    def _count(self, response: Any) -> None:\n        self._fruitless = 0\n",
        "    def _count(self, response: Any) -> None:\n",
        RESUMED + "test_each_attach_names_the_tokens_and_bytes_that_have_come",
    ),
    Mutant(
        "limit-times-front-ends",
        "a limit of calls at once holds for all front ends together",
        "service/frontends/group.py",
        "math.ceil(limit / count)",
        "limit",
        GROUP + "test_each_front_end_has_its_part_of_limits_that_hold_for_all",
    ),
    Mutant(
        "port-held-for-itself",
        "front ends can listen on the port that is held for them",
        "service/frontends/group.py",
        "        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n",
        "",
        GROUP + "test_a_held_port_is_shared_with_front_ends_and_with_no_other_server",
    ),
    Mutant(
        "one-token-of-a-prompt",
        "a prompt passes a front end whole",
        "service/frontends/plain_json.py",
        "args[:1] * len(value)",
        "args[:1]",
        WIRE + "test_data_comes_out_as_it_went_in",
    ),
    Mutant(
        "counted-again",
        "a call of a front end is counted once",
        "service/frontends/process.py",
        "counts, self._counts = self._counts, Counter()",
        "counts = self._counts",
        PAIR + "test_what_a_front_end_counts_is_told_once",
    ),
    Mutant(
        "front-end-keeps-a-tenants-place",
        "a tenant's place is given back through the front end that took it",
        "service/frontends/remote_desk.py",
        "Hold(lambda used: self._engine.end(number, used), number, weight=weight)",
        "Hold(None, number, weight=weight)",
        PAIR + "test_a_tenants_place_is_taken_and_given_back_in_the_engines_process",
    ),
    Mutant(
        "streams-of-a-lost-engine",
        "streams end when the engine's process is gone",
        "service/frontends/remote_engine.py",
        "        self.fail_streams(_dead())\n",
        "",
        PAIR + "test_streams_end_when_the_engines_process_is_gone",
    ),
    Mutant(
        "read-tokens-count-as-unread",
        "a reader that keeps up is never ended as one that does not",
        "service/frontends/remote_stream.py",
        "        self._pending -= len(delta.token_ids)\n",
        "",
        WIRE + "test_unread_deltas_are_merged_and_bounded",
    ),
    Mutant(
        "tokens-of-the-first-stream",
        "each stream of a frame gets its own tokens",
        "service/frontends/events.py",
        "first, told, at = first + id_count,",
        "first, told, at = 0,",
        WIRE + "test_a_batch_of_events_survives_being_cut_anywhere",
    ),
)
