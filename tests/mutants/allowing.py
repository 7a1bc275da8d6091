"""Mutants of who may call what, of what a caller's own is, and of what an operator is told of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SECURITY = "tests/security/"
OWN = "tests/tenants/test_own.py::"
SHARES = "tests/prefix/test_tenants.py::"

PERMITTING: tuple[Mutant, ...] = (
    Mutant(
        "strangers-follow-the-cache",
        "callers without a name read nothing of what others asked",
        "service/access/permissions.py",
        '"generate": frozenset({Permission.CALL}),',
        '"generate": frozenset({Permission.CALL, Permission.OWN}),',
        SECURITY + "test_strangers.py::test_no_stranger_reads_what_others_asked",
    ),
    Mutant(
        "unlisted-method-is-open",
        "a method that no permission names is refused to all",
        "service/access/auth_interceptor.py",
        "if permission is None or not self._permissions.may(caller, permission):",
        "if permission is not None and not self._permissions.may(caller, permission):",
        SECURITY + "test_permissions.py::test_a_method_that_is_in_no_table_is_refused_to_all",
    ),
    Mutant(
        "method-without-permission",
        "every registered method is in the one table",
        "service/access/permissions.py",
        '"LoadAdapter UnloadAdapter"',
        '"LoadAdapter"',
        SECURITY + "test_permissions.py::test_every_registered_method_is_in_the_table",
    ),
    Mutant(
        "every-name-administers",
        "only listed names change what others are served",
        "service/access/permissions.py",
        "return permission is not Permission.ADMIN or caller in self._admins",
        "return permission is not Permission.ADMIN or bool(caller)",
        SECURITY + "test_permissions.py::test_only_admins_change_what_others_are_served",
    ),
    Mutant(
        "any-certificate-of-the-authority",
        "of an authority's certificates those of listed names may call",
        "service/access/certificate_names.py",
        "if self._allowed is not None and name not in self._allowed:",
        "if False:",
        SECURITY + "test_certificates.py::test_only_listed_names_of_the_authority_may_call",
    ),
    Mutant(
        "trace-for-any-user",
        "a trace is for the server's own user on its machine",
        "service/metrics/trace.py",
        " and user() in (0, os.geteuid()))",
        ")",
        "tests/metrics/test_trace_user.py::test_a_local_trace_is_for_the_servers_user",
    ),
    Mutant(
        "another-connections-user",
        "a connection is known by both of its ports",
        "service/metrics/peer_user.py",
        "if ports == (client[1], server_port):",
        "if ports[0] == client[1]:",
        "tests/metrics/test_trace_user.py::test_the_kernel_says_whose_connection_it_is",
    ),
)

REVOKING: tuple[Mutant, ...] = (
    Mutant(
        "bad-file-keeps-the-removed",
        "a bad token file keeps no token that it is not seen to hold",
        "service/access/reloaded_file.py",
        "self._value = self._spoilt(self._good, contents)",
        "self._value = self._good",
        SECURITY + "test_revocation.py::test_a_bad_file_keeps_what_it_is_seen_to_hold_and_nothing_else",
    ),
    Mutant(
        "missing-file-keeps-all",
        "a token file that is away for longer than a moment refuses everybody",
        "service/access/reloaded_file.py",
        "absent and now - self._fine_at < GRACE_SECONDS",
        "absent",
        SECURITY + "test_revocation.py::test_a_file_that_is_away_is_waited_for_a_moment_and_refuses_everybody_then",
    ),
    Mutant(
        "failed-reload-untold",
        "an operator is told that a file cannot be used",
        "service/access/access_files.py",
        "False if file is None else file.failed",
        "False",
        SECURITY + "test_certificates.py::test_a_renewal_with_the_key_of_another_serves_the_old_pair_and_says_so",
    ),
    Mutant(
        "expiry-of-no-certificate",
        "metrics tell when the served certificates end",
        "service/access/file_metrics.py",
        "(end - datetime.now(UTC)).total_seconds()",
        "0.0",
        SECURITY + "test_certificates.py::test_the_end_of_both_certificates_is_told",
    ),
    Mutant(
        "last-end-of-the-chain",
        "a chain ends with the first of its certificates",
        "service/access/certificate_expiry.py",
        "return min(ends, default=None)",
        "return max(ends, default=None)",
        SECURITY + "test_certificates.py::test_of_a_chain_the_first_end_counts",
    ),
    Mutant(
        "years-of-two-digits",
        "the end of a certificate is read in both forms",
        "service/access/certificate_expiry.py",
        "    if tag == _UTC_TIME:\n",
        "    if len(digits) == 15:\n",
        SECURITY + "test_certificates.py::test_the_end_of_a_certificate_is_what_openssl_reads",
    ),
)

OWNING: tuple[Mutant, ...] = (
    Mutant(
        "flush-of-everybody",
        "a flush takes the caller's own pages",
        "service/gateway/servicer.py",
        "engine.prefixes.flush(self._calls.tenant)",
        "engine.prefixes.flush(None)",
        OWN + "test_a_flush_takes_the_callers_pages_and_an_admins_all",
    ),
    Mutant(
        "load-of-everybody",
        "a tenant sees its own load",
        "service/calls/open_calls.py",
        "return None if self._permissions.sees_all(caller) else caller",
        "return None",
        OWN + "test_a_tenant_sees_its_own_load_and_an_admin_all",
    ),
    Mutant(
        "subscriptions-without-share",
        "one caller leaves subscriptions for others",
        "service/gateway/subscriptions.py",
        ">= MAX_OF_ONE:",
        ">= MAX_SUBSCRIBERS:",
        OWN + "test_one_caller_takes_so_many_subscriptions_and_leaves_the_others",
    ),
    Mutant(
        "pages-without-share",
        "a tenant's cached pages are safe from others up to an equal share",
        "core/prefix/radix.py",
        "for tenant, most in self._tenants.turns(wanted):",
        "for tenant, most in [(each, each.pages) for each in self._tenants]:",
        SHARES + "test_what_one_tenant_holds_below_its_share_no_other_takes",
    ),
    Mutant(
        "pages-of-the-gone",
        "a tenant that left keeps nothing from one that is alone",
        "core/prefix/tenants.py",
        "if self._given_up - each.used_at >= total]",
        "if self._given_up < each.used_at]",
        SHARES + "test_a_tenant_that_left_keeps_nothing_from_one_that_is_alone",
    ),
    Mutant(
        "tokens-of-tenants-uncounted",
        "tokens are counted by tenant however a request ends",
        "core/engine/async_engine.py",
        "        self.open_streams.ended(stream)\n",
        "",
        OWN + "test_tokens_are_counted_by_tenant_however_requests_end",
    ),
    Mutant(
        "labels-of-callers",
        "only the tenants file makes labels",
        "service/calls/desk.py",
        "lambda name: self._refusals.bounded(self._gates.label(name))",
        "lambda name: name",
        OWN + "test_tokens_are_counted_by_tenant_however_requests_end",
    ),
    Mutant(
        "census-for-each-call",
        "streams are counted now and then, however often tenants ask",
        "service/limits/usage.py",
        "if streams is not None and now - self._counted_at >= CENSUS_SECONDS:",
        "if streams is not None:",
        OWN + "test_however_often_tenants_ask_streams_are_counted_now_and_then",
    ),
)

TELLING: tuple[Mutant, ...] = (
    Mutant(
        "refused-callers-unaudited",
        "each refused caller is in the audit log",
        "service/access/audit.py",
        "            self._refused(method, context, refused)\n",
        "            pass\n",
        SECURITY + "test_audit.py::test_each_act_of_an_admin_and_each_refused_caller_is_a_line",
    ),
    Mutant(
        "audit-floods",
        "a flood of refusals fills no log",
        "service/process/audit_log.py",
        "if self._written >= MOST_LINES or (",
        "if (",
        SECURITY + "test_audit.py::test_callers_of_many_names_get_so_many_lines_and_no_more",
    ),
    Mutant(
        "loaded-from-nowhere",
        "the line about an adapter that is loaded says from where",
        "service/servicers/adapters.py",
        "audit.note(adapter=request.name, path=request.path)",
        "audit.note(adapter=request.name)",
        SECURITY + "test_audit.py::test_each_act_of_an_admin_and_each_refused_caller_is_a_line",
    ),
    Mutant(
        "any-text-is-a-tenant",
        "a tenant's name is one that a token or a certificate can have",
        "service/access/tenant_file.py",
        "isinstance(given, str) and is_name(given)",
        "isinstance(given, str)",
        "tests/tenants/test_tenants_file.py::test_what_no_token_or_certificate_can_be_named_is_no_tenant",
    ),
    Mutant(
        "a-name-with-an-end",
        "a tenant's name is printable to its end",
        "service/tenant_ids.py",
        "_NAME.fullmatch(given) is not None",
        "_NAME.match(given) is not None",
        "tests/tenants/test_tenants_file.py::test_what_no_token_or_certificate_can_be_named_is_no_tenant",
    ),
)

ALLOWING: tuple[Mutant, ...] = (*PERMITTING, *REVOKING, *OWNING, *TELLING)
