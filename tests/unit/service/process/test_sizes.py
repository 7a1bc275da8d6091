"""Bytes are shown in the largest unit of which there is a whole one, rounded as they are shown."""

from __future__ import annotations

import pytest

from service.process.sizes import shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_250_000, "1.2 MB")),
        *((999_949, "999.9 kB"), (999_950, "1.0 MB"), (999.96e9, "1.0 TB")),
        *((15e9, "15.0 GB"), (1e12, "1.0 TB"), (3.26e15, "3260.0 TB")),
    ],
)
def test_shown(count: float, text: str) -> None:
    assert shown(count) == text
