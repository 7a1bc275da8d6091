"""Backends by name; a wrong name or a missing package is one clear line."""

from __future__ import annotations

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.registry import ATTENTION_BACKENDS, build_attention
from core.errors import ConfigError

CPU = torch.device("cpu")


def test_auto_and_its_name_build_the_same_class() -> None:
    assert isinstance(build_attention("auto", CPU), AttentionBackend)
    assert type(build_attention("auto", CPU)) is type(build_attention("torch_native", CPU))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="torch_native"):
        build_attention("flash", CPU)


def test_missing_package_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "exotic", "no_such_package.attention:Exotic")
    with pytest.raises(ConfigError, match=r"exotic.*no_such_package"):
        build_attention("exotic", CPU)
