"""Servers, a tiny real checkpoint and lines of the log, as the tests of security have them."""

from __future__ import annotations

from tests.security import conftest as secured

checkpoint = secured.checkpoint
config = secured.config
logged = secured.logged
serve = secured.serve
tiny = secured.tiny
