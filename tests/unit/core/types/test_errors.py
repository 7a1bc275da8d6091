"""What an error carries to the client, and what a broken invariant leaves behind."""

from __future__ import annotations

import pytest

from core import invariants
from core.errors import ConfigError, FieldViolation, InvalidRequest, ModelLoadError, Overloaded, QueueTimeout
from core.invariants import InvariantViolation, check


def test_an_invalid_request_names_all_its_fields_at_once() -> None:
    found = [FieldViolation("a.b", "is wrong"), FieldViolation("c", "too")]
    error = InvalidRequest(found)
    assert error.violations == tuple(found) and error.message == str(error) == "a.b: is wrong; c: too"
    assert InvalidRequest.of("c", "too").violations == (found[1],)


def test_who_is_told_to_come_back_is_told_why_and_when() -> None:
    full, late = Overloaded("full", reason="QUEUE_FULL", retry_after=2.5), QueueTimeout("late")
    assert (full.reason, full.retry_after) == ("QUEUE_FULL", 2.5)
    assert (late.reason, Overloaded.reason) == ("QUEUE_TIMEOUT", "OVERLOADED"), "one reason is no other's"
    assert (ConfigError("").exit_code, ModelLoadError("").exit_code) == (2, 3)


def test_a_broken_invariant_is_counted_under_its_name_and_says_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "FAILURES", dict.fromkeys(invariants.HOST_CHECKS, 0))
    check("row_double_free", True, row=1)
    for row in (3, 4):
        with pytest.raises(InvariantViolation, match=rf"row_double_free does not hold: row={row}, owner='x'"):
            check("row_double_free", False, row=row, owner="x")
    counted = {name: count for name, count in invariants.FAILURES.items() if count}
    assert counted == {"row_double_free": 2}
