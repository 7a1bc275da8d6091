"""What tests of replicas have in common."""

from __future__ import annotations

import pytest

from service.replicas import replica


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended starts again at once."""
    monkeypatch.setattr(replica, "FIRST_BACKOFF", 0.01)
