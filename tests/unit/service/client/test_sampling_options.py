"""The client's typed options are those of the API, by name and by kind."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence

from google.protobuf.descriptor import FieldDescriptor

from service.client import SamplingOptions
from service.pb.slipstream.v1 import inference_pb2 as pb

KINDS = {
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
}


def test_every_field_has_its_type() -> None:
    typed = typing.get_type_hints(SamplingOptions)
    fields = pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(typed) == set(fields)
    for name, field in fields.items():
        if field.message_type is not None:
            assert typed[name] == Mapping[int, float], name
        elif typing.get_origin(typed[name]) is not None:
            assert typed[name] == Sequence[KINDS[field.cpp_type]], name
        else:
            assert typed[name] is KINDS[field.cpp_type], name
