"""Formats of keys and values by the name that configuration uses. A new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from core.memory.kv_e4m3 import FP8_E4M3
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_int8 import INT8

KV_FORMATS: Final[Mapping[str, KVFormat]] = MappingProxyType({each.name: each for each in (PLAIN, FP8_E4M3, INT8)})
"""`core.model_config.KV_CACHE_DTYPES` has the same names."""
