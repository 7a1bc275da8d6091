"""Requests as bytes, mutated the way a hostile or broken client would: valid wire mostly, nonsense sometimes.

Works on descriptors, so that a new field is fuzzed without anyone thinking of it.
"""

from __future__ import annotations

import math
import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

INTS = (0, 1, -1, 2, 63, 64, 65, 319, 320, 1023, 1024, 2**31 - 1, -(2**31), 2**16)
ENUMS = (0, 0, 1, 2, 3, 4, -1, 2**31 - 1)
LONGS = (*INTS, 2**63 - 1, -(2**63), 2**32)
DOUBLES = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 100.0, 1e-45, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf)
STRINGS = ("", "a", "\0", "<|eos|>", "é" * 9, "z" * 300, "{{ x }}", "\U0001f468\u200d\U0001f469", "user", "/etc/passwd")
MAX_TOKENS = 3
"""Of what is generated for a fuzzed request that turns out to be valid."""


class Fuzzer:
    """Draws requests from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self, kind: type[Any]) -> bytes:
        """Bytes for a message of class `kind`: drawn field by field, and in a third of cases mutated as bytes."""
        message = kind()
        self._fill(message, 0)
        self._tame(message)
        raw = bytes(message.SerializeToString())
        return self._mutate(raw) if self.random.random() < 0.35 else raw

    def _tame(self, message: Any) -> None:
        """Most requests that would be served must end soon, or ten thousand of them take an hour."""
        if "sampling_params" in message.DESCRIPTOR.fields_by_name:
            params = message.sampling_params
            if not params.HasField("max_tokens") or params.max_tokens > MAX_TOKENS:
                params.max_tokens = MAX_TOKENS
            if params.n > 4 and self.random.random() < 0.9:
                params.n = 4

    def _fill(self, message: Any, depth: int) -> None:
        fields = list(message.DESCRIPTOR.fields)
        for field in self.random.sample(fields, self.random.randint(0, min(6, len(fields)))):
            self._set(message, field, depth)

    def _set(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        target = getattr(message, field.name)
        if field.is_repeated:
            count = self.random.choice((0, 1, 1, 2, 3, 17, 65))
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for _ in range(count):
                    target[self._scalar(field.message_type.fields_by_name["key"])] = self._scalar(
                        field.message_type.fields_by_name["value"]
                    )
            elif field.message_type is not None:
                for _ in range(min(count, 5)):
                    self._fill(target.add(), depth + 1)
            else:
                target.extend(self._scalar(field) for _ in range(count))
        elif field.message_type is not None:
            target.SetInParent()
            self._fill(target, depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        kinds: dict[int, tuple[Any, ...]] = {
            FieldDescriptor.CPPTYPE_INT32: INTS,
            FieldDescriptor.CPPTYPE_INT64: LONGS,
            FieldDescriptor.CPPTYPE_DOUBLE: DOUBLES,
            FieldDescriptor.CPPTYPE_BOOL: (False, True),
            FieldDescriptor.CPPTYPE_STRING: STRINGS,
            FieldDescriptor.CPPTYPE_ENUM: ENUMS,
        }
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.choice(STRINGS).encode()
        # Half of the numbers near zero, where most ranges are, so that requests are not all refused for one field.
        if (
            field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
            and self.random.random() < 0.5
        ):
            return self.random.randint(0, 5)
        if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE and self.random.random() < 0.5:
            return self.random.random()
        return self.random.choice(kinds[field.cpp_type])

    def _mutate(self, raw: bytes) -> bytes:
        rnd = self.random
        data = bytearray(raw)
        for _ in range(rnd.randint(1, 4)):
            place = rnd.randint(0, len(data))
            action = rnd.randrange(7)
            if action == 0 and data:
                data[place % len(data)] ^= 1 << rnd.randrange(8)
            elif action == 1:
                data[place:place] = rnd.randbytes(rnd.randint(1, 8))
            elif action == 2:
                del data[place : place + rnd.randint(1, 8)]
            elif action == 3:
                data += self._unknown_field()
            elif action == 4:
                # The same message twice in a row is one message whose later fields win.
                data += bytes(data[:200])
            elif action == 5:
                data[place:place] = b"\xff" * rnd.randint(1, 11)
            else:
                # A group, and a length that points past the end.
                data += rnd.choice((b"\x0b", b"\x0b\x0c", b"\x0a\xff\xff\xff\x7f", b"\x12\x80\x80\x80\x80\x80"))
        return bytes(data)

    def _unknown_field(self) -> bytes:
        number = self.random.choice((100, 1000, 2**29 - 1, 19_000))
        kind = self.random.choice((0, 1, 2, 5))
        payload = {0: b"\x05", 1: struct.pack("<d", math.nan), 2: b"\x03abc", 5: struct.pack("<f", math.inf)}[kind]
        return _varint(number << 3 | kind) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
