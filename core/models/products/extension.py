"""The products in C++, compiled for this machine: `python -m core.models.products.extension` does it before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.native.library import Library, main

HEADERS = "ahead.h bytes.h grouped.h linear.h nibbles.h panels.h parts.h scratch.h team.h vectors.h".split()
NATIVE = Path(__file__).resolve().parents[1] / "native"
PRODUCTS = Library(
    name="slipstream_products",
    at="core.models.products.extension:PRODUCTS",
    sources=(Path(__file__).with_name("products.cpp"), *(NATIVE / name for name in HEADERS)),
    uses_torch=True,
)


def is_built() -> bool:
    """Whether `load_extension` would find it in the cache, whole."""
    return PRODUCTS.is_built()


def load_extension() -> Any:
    """The module, compiled first if need be (half a minute to a few). Raises ExtensionUnavailable."""
    return PRODUCTS.load()


if __name__ == "__main__":
    main(PRODUCTS)
