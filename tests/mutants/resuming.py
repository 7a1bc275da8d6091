"""Mutants of tenants and of streams that outlive their connection."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GATES = "tests/tenants/test_gates.py::"
SERVED = "tests/tenants/test_tenants_served.py::"
ATTACH = "tests/system/test_attach.py::"

RESUMING: tuple[Mutant, ...] = (
    Mutant(
        "ids-of-all-tenants",
        "a request id is its tenant's own",
        "service/tenant_ids.py",
        'return request_id if caller is None else f"{caller}\\0{request_id}"',
        "return request_id",
        SERVED + "test_another_tenants_stream_is_not_there",
    ),
    Mutant(
        "labels-from-callers",
        "only the tenants file makes labels",
        "service/access/tenant_file.py",
        "return tenant if tenant in self._limits else OTHER",
        "return tenant",
        "tests/tenants/test_limits.py::test_listed_tenants_have_their_own_limits_and_all_others_one_line",
    ),
    Mutant(
        "labels-without-bound",
        "the number of labels is bounded however often the file changes",
        "service/limits/refusals.py",
        "if len(self._labels) > MAX_TENANTS:",
        "if len(self._labels) < 0:",
        GATES + "test_labels_are_bounded_however_often_the_file_changes",
    ),
    Mutant(
        "place-given-back-twice",
        "a place in a tenant's gate is given back once",
        "service/limits/hold.py",
        "leave, self._leave = self._leave, None\n        if leave",
        "leave = self._leave\n        if leave",
        GATES + "test_a_place_is_given_back_once_and_moves_with_its_holder",
    ),
    Mutant(
        "replay-one-token-late",
        "a reader gets every token after its place",
        "service/resume/history.py",
        "skipped = max(0, place.tokens - self.tokens_at)",
        "skipped = max(0, place.tokens - self.tokens_at + bool(place.tokens))",
        ATTACH + "test_any_place_that_a_client_remembers_is_a_place_to_go_on_from",
    ),
    Mutant(
        "text-from-the-ids",
        "text goes on where the reader's text ends, not where its ids do",
        "service/resume/history.py",
        "text = self.text[max(0, place.text_bytes - self.text_at) :]",
        "text = self.text[0 if place.tokens <= self.tokens_at else max(0, place.text_bytes - self.text_at) :]",
        ATTACH + "test_any_place_that_a_client_remembers_is_a_place_to_go_on_from",
    ),
    Mutant(
        "read-and-forgotten",
        "what a reader was told is history",
        "service/resume/kept.py",
        "        self.history.add(event)\n",
        "        self.history.add(event) if self.reader is None else None\n",
        ATTACH + "test_a_client_that_died_goes_on_from_a_new_process",
    ),
    Mutant(
        "two-readers",
        "a stream has one reader",
        "service/resume/kept.py",
        "            self.reader.take_over()\n            await self.reader.gone.wait()\n",
        "            self.reader.gone.set()\n            self.reader = None\n",
        ATTACH + "test_the_second_reader_takes_the_stream_from_the_first",
    ),
    Mutant(
        "kept-for-ever",
        "a stream that nobody comes for is ended",
        "service/resume/retention.py",
        "loop.call_later(self._seconds, self._drop, kept, StreamExpired)",
        "loop.call_later(1e6, self._drop, kept, StreamExpired)",
        ATTACH + "test_nobody_comes_in_time",
    ),
    Mutant(
        "kept-without-bound",
        "kept streams of one tenant stay within their bytes",
        "service/resume/retention.py",
        "            if by > 0:\n                self._shrink_to(kept.tenant, 0)\n",
        "",
        SERVED + "test_a_history_that_passes_the_bound_loses_its_beginning_and_says_so",
    ),
    Mutant(
        "digest-of-nothing",
        "another request under the id of a kept stream is refused",
        "service/resume/retention.py",
        "elif kept.digest != digest:",
        "elif kept.digest == b'':",
        ATTACH + "test_the_same_request_sent_again_is_the_same_stream_and_another_is_refused",
    ),
    Mutant(
        "digest-of-the-trace",
        "a request sent again within another trace is the same request",
        "service/resume/retention.py",
        'token_ids=None, trace_id="", tenant="", weight=1.0)',
        'token_ids=None, tenant="", weight=1.0)',
        ATTACH + "test_the_same_request_sent_again_is_the_same_stream_and_another_is_refused",
    ),
    Mutant(
        "gate-of-our-own-service",
        "every service's calls pass the tenant's gate",
        "service/calls/open_calls.py",
        "place = await self._desk.enter(caller_name.get(), deadline, work)",
        "place = await self._desk.enter(None, deadline, work)",
        "tests/gateway/test_tenants.py::test_one_tenant_is_limited_and_the_other_is_not",
    ),
    Mutant(
        "ids-of-the-engine-told",
        "clients see the ids that they gave",
        "service/wire/generate.py",
        "self.request_id = public_id(request_id)",
        "self.request_id = request_id",
        SERVED + "test_ids_are_the_tenants_own",
    ),
    Mutant(
        "dead-engine-retried",
        "a request that an engine died under is not carried to the next",
        "service/servicers/inference.py",
        "    if isinstance(error, EngineDead):\n",
        "    if False:\n",
        "tests/service/test_statuses.py::test_failures_inside_a_stream_look_the_same",
    ),
    Mutant(
        "kept-id-refused-to-all",
        "the id of a stream that is over and kept is refused to other resumable requests only",
        "service/servicers/inference.py",
        "if request.resumable:",
        "if request.request_id:",
        ATTACH + "test_the_id_of_a_stream_that_is_over_and_kept_is_free_for_a_request_that_is_not_resumable",
    ),
)
