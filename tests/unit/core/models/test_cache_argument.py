"""The name under which a transformers module takes its cache, of any version."""

from __future__ import annotations

from typing import Any

import pytest

from core.models.hf.cache_argument import cache_argument, takes_cache


def new(hidden: Any, cache: Any = None) -> None: ...


def attention(hidden: Any, past_key_values: Any = None) -> None: ...


def mixer(hidden: Any, cache_params: Any = None) -> None: ...


def between(hidden: Any, past_key_values: Any = None, cache: Any = None) -> None: ...


def plain(hidden: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("forward", "name"),
    [(new, "cache"), (attention, "past_key_values"), (mixer, "cache_params"), (between, "cache")],
)
def test_the_newest_name_of_a_signature_is_taken(forward: Any, name: str) -> None:
    assert takes_cache(forward)
    assert cache_argument(forward) == name


def test_what_takes_no_cache_is_named() -> None:
    assert not takes_cache(plain)
    with pytest.raises(TypeError, match="plain takes no cache, but hidden, kwargs"):
        cache_argument(plain)
