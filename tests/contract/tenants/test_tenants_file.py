"""A tenants file that a careless or hostile hand wrote: refused in one line, at once, and never the callers' fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError, StartupError
from service.access.tenant_file import MAX_TENANTS, parse_tenants
from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.config.sources import load
from service.config.yaml_files import MAX_DEPTH, MAX_NODES, MAX_PLAIN_CHARS, MAX_YAML_BYTES
from service.tenant_ids import MAX_NAME_CHARS
from tests.contract.tenants.test_tenants_served import ALICE, files
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import ONCE, Serve

DOUBLING = "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 18))

UNREADABLE = {
    "no day": ("until: 2026-02-30", "not valid YAML: day is out of range"),
    "no number": ("alice: {weight: 0x_}", "not valid YAML: invalid literal"),
    "no timestamp": ("alice: !!timestamp 2", "not valid YAML"),
    "digits": (f"port: {'9' * 5000}", f"line 1: more than {MAX_PLAIN_CHARS} characters without quotes"),
    "deep lists": ("[" * 900, f"line 1: more than {MAX_DEPTH} levels deep"),
    # Newer parsers look ahead, and have a bound of their own.
    "deeper lists": ("[" * 100_000, "line 1: "),
    "deep sequences": ("- " * 100_000, f"line 1: more than {MAX_DEPTH} levels deep"),
    "deep mappings": ("{a: " * 50_000, f"line 1: more than {MAX_DEPTH} levels deep"),
    "long": (f"[{'a,' * 100_000}]", f"holds more than {MAX_NODES} keys and values"),
    "doubling": (f"a0: &a0 {{weight: 1}}\n{DOUBLING}", f"holds more than {MAX_NODES} keys and values"),
    "large": (f"# {'a' * MAX_YAML_BYTES}", f"is larger than {MAX_YAML_BYTES} bytes"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_line_that_says_why(name: str, tmp_path: Path) -> None:
    text, why = UNREADABLE[name]
    path = tmp_path / "given.yaml"
    path.write_text(text)
    for read in (
        lambda: parse_tenants(text.encode(), path),
        lambda: load(ServerConfig, {}, {}, str(path)),
    ):
        with pytest.raises(StartupError) as refused:
            read()
        told = refused.value.message
        assert told.startswith(str(path)) and why in told and told.isascii() and "\n" not in told and len(told) < 400


def test_nesting_is_bounded_before_anything_is_made_of_it() -> None:
    with pytest.raises(StartupError, match=f"^f, line 1: more than {MAX_DEPTH} levels deep"):
        parse_tenants(f"{'[' * (MAX_DEPTH + 1)}{']' * (MAX_DEPTH + 1)}".encode(), "f")


@pytest.mark.parametrize("key", ["requests_per_second", "tokens_per_minute", "concurrent_requests", "weight"])
def test_a_limit_that_no_float_holds_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match=rf"^f: 'alice': {key} must be a (whole )?number from "):
        parse_tenants(f"alice: {{{key}: 1{'0' * 400}}}".encode(), "f")


def test_a_setting_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(f"drain_grace: 1{'0' * 400}")
    with pytest.raises(ConfigError, match=r"drain_grace: 10{400} is not a number"):
        load(ServerConfig, {}, {}, str(path))


@pytest.mark.parametrize("name", ['"a\\0b"', '"a\\nb"', "é", '"\\x7f"', "1", "null", '""', "a" * (MAX_NAME_CHARS + 1)])
def test_what_no_token_or_certificate_can_be_named_is_no_tenant(name: str) -> None:
    with pytest.raises(StartupError, match=r"^f: .+ is no name of a tenant: 1 to 256 printable ASCII"):
        parse_tenants(f"bob:\n{name}: {{weight: 2}}".encode(), "f")


@pytest.mark.parametrize("text", ['"\\ud800": {}', '{"\\uD800\\uDC00": {}}'])
def test_a_surrogate_is_no_tenant(text: str) -> None:
    with pytest.raises(StartupError, match=r"^f"):
        parse_tenants(text.encode(), "f")


@pytest.mark.parametrize(
    "name", ["spiffe://example.org/ns/a/sa/b", "Build Server", "alice.b-c_1", "a" * MAX_NAME_CHARS]
)
def test_names_of_certificates_and_tokens_are_tenants(name: str) -> None:
    assert parse_tenants(f"{name!r}: {{weight: 2}}".replace("'", '"').encode(), "f").names == (name,)


def test_the_most_tenants_with_all_their_limits_fit() -> None:
    limits = "{requests_per_second: 20, concurrent_requests: 64, concurrent_sequences: 128, tokens_per_minute: 600000}"
    book = parse_tenants("".join(f"{n:0120}a: {limits}\n" for n in range(MAX_TENANTS)).encode(), "f")
    assert len(book.names) == MAX_TENANTS


@pytest.mark.parametrize("name", ["no day", "no number", "deep lists"])
async def test_a_file_that_breaks_the_parser_fails_no_call(
    name: str,
    serve: Serve,
    tmp_path: Path,
    logged: Any,
) -> None:
    named = files(tmp_path)
    async with serve(FakeEngine(), **named) as serving:
        async with SlipstreamClient(serving.target, ONCE, token=ALICE) as alice:
            Path(named["tenants_file"]).write_text(UNREADABLE[name][0])
            for _ in range(3):
                assert len((await alice.complete("hi"))[0].token_ids) == 8
            assert 'slipstream_reload_failed{file="tenants"} 1.0' in await serving.metrics()
    told = [line for line in logged.text.splitlines() if "going on with the last good one" in line]
    assert len(told) == 1 and UNREADABLE[name][1] in told[0]
