"""The products in C++, compiled for this machine: `python -m core.models.products.extension` does it before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.native.library import Library, main

HERE = Path(__file__)
HEADERS = (
    "activations.h ahead.h attention.h bytes.h code_panels.h grouped.h kernels.h linear.h nibbles.h norms.h "
    "number_panels.h pages.h panels.h parts.h scratch.h sharing.h stored.h team.h vectors.h"
).split()
NATIVE = HERE.resolve().parents[1] / "native"
PRODUCTS = Library(
    name="slipstream_products",
    at="core.models.products.extension:PRODUCTS",
    sources=(
        HERE.with_name("products.cpp"),
        HERE.with_name("encoder_layer.h"),
        HERE.with_name("epilogue.h"),
        HERE.with_name("product.h"),
        HERE.with_name("texts.h"),
        *(NATIVE / name for name in HEADERS),
    ),
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
