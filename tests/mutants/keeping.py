"""Mutants of what outlives one moment: watches over tokens, kept streams, what a front end had."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RETAINED = "tests/tenants/test_retention.py::"
HOSTED = "tests/service/test_frontend_host.py::"

KEEPING: tuple[Mutant, ...] = (
    Mutant(
        "token-looked-at-once",
        "a token is looked at as long as its call lives",
        "service/access/auth_interceptor.py",
        "        if self._still_listed():\n            self.begin()\n",
        "        if self._still_listed():\n            pass\n",
        "tests/security/test_revoked_later.py::test_a_token_revoked_after_it_was_found_listed_ends_its_stream",
    ),
    Mutant(
        "refused-stream-keeps-its-bytes",
        "a refused request takes nothing of the bound",
        "service/resume/retention.py",
        "                self._count(tenant, -taken)\n                raise\n",
        "                raise\n",
        RETAINED + "test_requests_that_the_engine_refuses_take_nothing_of_the_bound",
    ),
    Mutant(
        "gone-streams-remembered-for-ever",
        "what is remembered of streams that are gone is bounded",
        "service/resume/retention.py",
        "        while len(self._gone) > MAX_REMEMBERED:\n            self._gone.popitem(last=False)\n",
        "",
        RETAINED + "test_only_so_many_streams_that_are_gone_are_remembered",
    ),
    Mutant(
        "newest-forgotten-first",
        "the newest of the streams that are gone are remembered",
        "service/resume/retention.py",
        "self._gone.popitem(last=False)",
        "self._gone.popitem()",
        RETAINED + "test_only_so_many_streams_that_are_gone_are_remembered",
    ),
    Mutant(
        "smallest-tenant-gives-way",
        "the tenant that has most gives way",
        "service/resume/retention.py",
        "key=lambda each: -each.bytes)",
        "key=lambda each: each.bytes)",
        RETAINED + "test_the_tenant_that_has_most_gives_way_to_all_others",
    ),
    Mutant(
        "full-link-written-to",
        "tokens wait in the engine while the connection is full",
        "service/frontends/host.py",
        "while ready and not self.link.full:",
        "while ready:",
        HOSTED + "test_tokens_wait_in_the_engine_while_the_connection_is_full",
    ),
    Mutant(
        "lost-embeddings-go-on",
        "a front end that is gone takes its embeddings along",
        "service/frontends/host.py",
        "[*self._calls, *self._streams, *self._embeds, *self._holds, *self._prefixes]",
        "[*self._calls, *self._streams, *self._holds, *self._prefixes]",
        HOSTED + "test_a_front_end_that_is_lost_takes_along_everything_it_had",
    ),
    Mutant(
        "lost-places-kept",
        "a front end that is gone gives back its places in the gates",
        "service/frontends/host.py",
        "[*self._calls, *self._streams, *self._embeds, *self._holds, *self._prefixes]",
        "[*self._calls, *self._streams, *self._embeds, *self._prefixes]",
        HOSTED + "test_a_front_end_that_is_lost_takes_along_everything_it_had",
    ),
)
