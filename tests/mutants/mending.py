"""Mutants of faults that a reading of the code found: what is given back, victims, connections at their limit."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STOPPING = "tests/engine/test_stopping_while_arriving.py::"
COMPILES = "tests/engine/test_grammar_compiler.py::"
REPLACED = "tests/service/test_front_ends_replaced.py::"
GATE = "tests/service/test_call_gate.py::"

MENDING: tuple[Mutant, ...] = (
    Mutant(
        "turn-after-closing",
        "work whose turn came in the moment of closing ends with Draining",
        "core/engine/workers.py",
        "the pool takes no work any more.\n        if self._closed.is_set():\n",
        "\n        if False:\n",
        STOPPING + "test_work_whose_turn_came_in_the_moment_of_closing_ends_with_draining",
    ),
    Mutant(
        "failed-text-keeps-its-bytes",
        "a stream whose text fails gives back what was counted",
        "core/engine/streams/token_stream.py",
        "            event = None\n",
        "            return None\n",
        "tests/engine/test_unread.py::test_a_stream_whose_text_fails_gives_back_what_was_counted",
    ),
    Mutant(
        "shared-compile-makes-room",
        "a full queue drops no constraint that a shorter line waits for too",
        "core/engine/grammar/compile_queue.py",
        "if sum(job in line for line in self._lines.values()) == 1",
        "if job",
        COMPILES + "test_a_full_queue_drops_no_constraint_that_a_shorter_line_waits_for_too",
    ),
    Mutant(
        "given-way-as-complete",
        "a complete stream that gave way ends with an error",
        "service/frontends/remote_stream.py",
        "            if self._error is not None:\n                self._ended = True\n",
        "            if self._error is not None and self._open_outputs:\n                self._ended = True\n",
        "tests/service/test_remote_unread.py::test_a_complete_stream_that_gave_way_ends_with_an_error",
    ),
    Mutant(
        "one-failed-fork-is-the-last",
        "a machine without room for a process is asked again",
        "service/frontends/group.py",
        'OSError as error:\n                log.error("a front end cannot',
        'TimeoutError as error:\n                log.error("a front end cannot',
        REPLACED + "test_a_machine_without_room_for_a_process_is_asked_again",
        dies_by="timeout",
    ),
    Mutant(
        "no-pause-after-a-failed-fork",
        "a machine without room is not asked in a busy loop",
        "service/frontends/group.py",
        "                backoff = LONGEST_BACKOFF\n",
        "                backoff = 0.0\n",
        REPLACED + "test_a_machine_without_room_for_a_process_is_asked_again",
    ),
    Mutant(
        "the-dead-are-killed",
        "a front end that has ended is not killed again",
        "service/frontends/front_end.py",
        "        if self.process.returncode is not None:\n",
        "        if False:\n",
        REPLACED + "test_a_front_end_that_has_ended_is_not_killed_again",
    ),
    Mutant(
        "infinity-cuts-the-link",
        "an end with a broken body ends its call all the same",
        "service/frontends/host.py",
        "TypeError, OverflowError, RecursionError",
        "TypeError, RecursionError",
        "tests/service/test_broken_frames.py::test_an_end_with_a_broken_body_ends_its_call_all_the_same",
    ),
    Mutant(
        "places-of-no-thread",
        "a connection that no thread could be started for takes no place of the metrics port",
        "service/metrics/http.py",
        "            self.connections.leave(request)\n            raise\n",
        "            raise\n",
        "tests/metrics/test_connections.py::test_connections_that_no_thread_could_be_started_for_take_no_places",
    ),
    Mutant(
        "closed-socket-is-roots",
        "a client that has closed its socket is not taken for root",
        "service/metrics/peer_user.py",
        "            if columns[_STATE] != _ESTABLISHED:\n",
        "            if False:\n",
        "tests/metrics/test_trace_user.py::test_a_client_that_has_closed_its_socket_is_not_taken_for_root",
    ),
    Mutant(
        "new-gate-forgotten-at-once",
        "a tenant that comes when all gates are in use has one too",
        "service/limits/tenant_limiter.py",
        "self._forget_idle(len(self._gates) + 1 - MAX_GATES)\n"
        "            gate = self._gates[tenant] = _Gate(limits, self._max_wait)\n",
        "gate = self._gates[tenant] = _Gate(limits, self._max_wait)\n"
        "            self._forget_idle(len(self._gates) - MAX_GATES)\n",
        "tests/tenants/test_gates.py::test_a_tenant_that_comes_when_all_gates_are_in_use_has_one_too",
    ),
    Mutant(
        "refusals-hide-acts",
        "a flood of refusals hides no act from the audit log",
        "service/access/audit.py",
        "self._acts, self._refusals = audit_log.Floods(), audit_log.Floods()",
        "self._acts = self._refusals = audit_log.Floods()",
        "tests/security/test_audit.py::test_refusals_hide_no_act_and_many_flushes_are_a_line",
    ),
    Mutant(
        "late-is-hung",
        "a look that is late for less than seconds is not told of",
        "service/access/timed_look.py",
        "and time.monotonic() - self._began >= HUNG_SECONDS",
        "",
        "tests/security/test_hanging_mounts.py::test_only_a_look_that_is_late_for_seconds_is_told_of",
    ),
    Mutant(
        "bad-contents-parsed-at-each-look",
        "bad contents of a file are parsed once",
        "service/access/reloaded_file.py",
        "if self._told and digest == self._bad:",
        "if False:",
        "tests/security/test_reloaded.py::test_bad_contents_are_parsed_once",
    ),
    Mutant(
        "few-calls-on-a-connection",
        "a client with hundreds of calls in hand on one connection loses none",
        "service/config/server_config.py",
        '1024, "Network", "Most calls open',
        '256, "Network", "Most calls open',
        GATE + "test_one_connection_with_more_calls_in_hand_than_batches_are_large_loses_none",
    ),
)
