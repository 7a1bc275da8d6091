"""The decoder in C++, compiled for this machine: `python -m core.models.native.extension` does it before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.native.library import Library, main

PARTS = (
    "decoder.cpp activations.h ahead.h attention.h beside.h blocks.h bytes.h code_panels.h conv.h delta.h experts.h "
    "grouped.h kernels.h latents.h layer_inputs.h linear.h mamba1.h mamba2.h mixer.h narrowing.h nibbles.h norms.h "
    "number_panels.h pages.h panels.h parting.h parts.h plan.h rotary.h routing.h scratch.h sharing.h short_conv.h "
    "states.h stored.h team.h vectors.h workshop.h"
).split()
DECODER = Library(
    name="slipstream_decoder",
    at="core.models.native.extension:DECODER",
    sources=tuple(Path(__file__).with_name(name) for name in PARTS),
    uses_torch=True,
)


def is_built() -> bool:
    """Whether `load_extension` would find it in the cache, whole."""
    return DECODER.is_built()


def load_extension() -> Any:
    """The module, compiled first if need be (half a minute to a few). Raises ExtensionUnavailable."""
    return DECODER.load()


if __name__ == "__main__":
    main(DECODER)
