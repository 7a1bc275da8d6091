"""The tenants file: what it may say, that it is read again, and that nothing in it is taken for something else."""

from __future__ import annotations

import pytest

from core.errors import ConfigError, StartupError
from service.access.tenant_file import MAX_TENANTS, TenantLimits, parse_tenants
from service.config.server_config import ServerConfig

GOOD = b'alice: {requests_per_second: 20, concurrent_requests: 64}\nbob:\n"*": {concurrent_requests: 4}\n'


def test_listed_tenants_have_their_own_limits_and_all_others_one_line() -> None:
    book = parse_tenants(GOOD, "f")
    assert book.of("alice") == TenantLimits(20.0, 64)
    assert book.of("bob").none, "listed without limits is without limits"
    assert book.of("carol") == book.of("*") == TenantLimits(None, 4)
    assert (book.label("alice"), book.label("carol"), book.label("*")) == ("alice", "other", "other")
    assert parse_tenants(b"alice: {concurrent_requests: 0}", "f").of("carol").none


@pytest.mark.parametrize(
    "text",
    [
        "",
        "alice",
        "- alice",
        "alice: 3",
        "alice: {rate: 3}",
        "alice: {requests_per_second: 0}",
        "alice: {requests_per_second: .nan}",
        "alice: {requests_per_second: .inf}",
        "alice: {requests_per_second: true}",
        "alice: {concurrent_requests: -1}",
        "alice: {concurrent_requests: 1.5}",
        "alice: {concurrent_requests: many}",
        "1: {concurrent_requests: 1}",
        "a: {b: [",
        "!!python/object/apply:os.system ['true']",
        "".join(f"t{n}:\n" for n in range(MAX_TENANTS + 1)),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_files_name(text: str) -> None:
    with pytest.raises(StartupError, match=r"^the-file"):
        parse_tenants(text.encode(), "the-file")


def test_limits_need_somebody_who_says_who_calls() -> None:
    with pytest.raises(ConfigError, match="tenants_file needs"):
        ServerConfig.of(tenants_file="f")
    ServerConfig.of(tenants_file="f", auth_token_file="t")
