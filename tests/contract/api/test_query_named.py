"""What is wrong with the query of a Score call is said once, however many documents it has."""

from __future__ import annotations

from core.errors import FieldViolation, InvalidRequest
from service.wire.judge import of_documents


def test_the_query_is_named_once_and_documents_by_their_places() -> None:
    found = of_documents(
        InvalidRequest(
            [
                FieldViolation("inputs[0].pair.first", "is long"),
                FieldViolation("inputs[1].pair", "is odd"),
                FieldViolation("inputs[2].pair.first", "is long"),
                FieldViolation("adapter", "is none"),
            ]
        )
    )
    assert found.violations == (
        FieldViolation("query", "is long"),
        FieldViolation("documents[1]", "is odd"),
        FieldViolation("adapter", "is none"),
    )
