"""Names for the array types that cross floors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Rows, lengths, positions, slots, ids: every integer array of the host side."""

Floats = npt.NDArray[np.float32]
"""Sampling options and log probabilities."""

Bools = npt.NDArray[np.bool_]
"""Masks over rows."""
