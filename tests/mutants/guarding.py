"""Mutants of who may call: tokens and their rotation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AUTHENTICATION = "tests/security/test_authentication.py::"

GUARDING: tuple[Mutant, ...] = (
    Mutant(
        "tokens-compared-by-value",
        "the time of a comparison tells nothing about a token",
        "service/auth_tokens.py",
        "if hmac.compare_digest(caller.digest, digest):",
        "if caller.digest == digest:",
        AUTHENTICATION + "test_no_token_is_compared_by_value",
    ),
    Mutant(
        "comparison-ends-early",
        "the time of a comparison tells nothing about a token's place in the file",
        "service/auth_tokens.py",
        "                found = caller\n",
        "                return caller\n",
        AUTHENTICATION + "test_every_entry_is_compared_however_early_one_matches",
    ),
    Mutant(
        "default-allow",
        "a method that nobody thought of is refused without a token",
        "service/auth.py",
        'method.strip("/").rpartition("/")[0] in PUBLIC_SERVICES',
        'not method.startswith("/slipstream")',
        AUTHENTICATION + "test_every_registered_method_is_refused_without_a_token",
    ),
    Mutant(
        "tokens-read-once",
        "a token file is read again when it changes",
        "service/reloaded.py",
        "if stamp != self._stamp:",
        "if self._value is None:",
        "tests/security/test_reloaded.py::test_every_way_of_writing_is_noticed",
    ),
    Mutant(
        "revoked-stream-goes-on",
        "a stream ends when its token is revoked",
        "service/auth.py",
        "if self._still_listed():",
        "if self._still_listed() or True:",
        AUTHENTICATION + "test_a_revoked_token_ends_its_stream_and_no_other",
    ),
)
