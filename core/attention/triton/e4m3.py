"""Eight-bit floats (e4m3) as bytes: written and read by arithmetic on bits.

Instructions for them exist from compute capability 8.9 on, and Triton's interpreter rounds them wrongly (3.7: a
mantissa that overflows loses its carry). These few operations are the same numbers everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NAN = tl.constexpr(0x7F)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_PER_STEP = tl.constexpr(2.0**9)
"""Below the least normal number there are numbers in steps of 2^-9."""
_WHOLE = tl.constexpr(float(1 << 23))
"""From here on a float32 has no digits behind the point: to add it rounds to whole numbers, to even ones halfway."""


@triton.jit
def encode(values) -> tl.tensor:
    """uint8 of the same shape: `values`, float32, at most 448 in size or NaN, rounded to nearest, to even halfway."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Half of what is cut off is added, less one bit where that makes a number halfway even.
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    steps = (tl.abs(values) * _PER_STEP + _WHOLE).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(values) < _LEAST_NORMAL, steps, normal)
    code = tl.where(values != values, _NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(codes) -> tl.tensor:
    """float16 of the same shape: the numbers of `codes`, uint8, which float16 has all.

    Their bits, one place to the right of those of a float16, are that number over 2^8, since biases are 7 and 15.
    """
    wide = codes.to(tl.int16)
    # Sign, then a zero for the exponent's first bit; a NaN has all other bits.
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    numbers = halves.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == _NAN, float("nan"), numbers)


@triton.jit
def exponents_of(values) -> tl.tensor:
    """int32 [N]: exponents, biased by 127, of the scales of `values`, float32 [N, D]; see `core.memory.kv_e4m3`."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    return tl.maximum((largest >> 23) - 7, 1)


@triton.jit
def encode_by(values, exponents) -> tl.tensor:
    """uint8 [N, D]: codes of `values`, float32 [N, D], by scales of `exponents`, int32 [N]; not finite: NaN."""
    scaled = values * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
    return encode(tl.where(tl.abs(scaled) <= 448.0, scaled, float("nan")))


@triton.jit
def read_scales(scales, slots, head, there, HEADS: tl.constexpr) -> tl.tensor:
    """float32 [N]: scales of `head` at `slots` of scales [slots, HEADS]; 0 where not `there`."""
    exponents = tl.load(scales + slots * HEADS + head, mask=there, other=0).to(tl.int32)
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(stored, KIND: tl.constexpr, CODES: tl.constexpr) -> tl.tensor:
    """What is `stored`, as KIND: as it is (CODES 0), or its codes' numbers, by arithmetic (1) or by instructions (2).

    Both of these are exact. The instructions exist from compute capability 8.9 on.
    """
    if CODES == 1:
        stored = decode(stored).to(tl.float32).to(KIND)
    if CODES == 2:
        stored = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(KIND)
    return stored
