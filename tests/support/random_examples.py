"""How Hypothesis draws: without a deadline, for machines are shared, and with what replays a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("slipstream", deadline=None, print_blob=True)
settings.load_profile("slipstream")
