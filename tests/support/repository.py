"""Where the files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository, or of the copy of it that these tests are of."""
