import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_STATE_UNSPECIFIED: _ClassVar[AdapterState]
    ADAPTER_STATE_READY: _ClassVar[AdapterState]
    ADAPTER_STATE_UNLOADING: _ClassVar[AdapterState]
ADAPTER_STATE_UNSPECIFIED: AdapterState
ADAPTER_STATE_READY: AdapterState
ADAPTER_STATE_UNLOADING: AdapterState

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "evicted")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    evicted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., evicted: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("live_requests",)
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    live_requests: int
    def __init__(self, live_requests: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "used_bytes", "max_bytes")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    used_bytes: int
    max_bytes: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., used_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "state", "load_id", "rank", "bytes", "pinned", "live_requests", "idle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: AdapterState
    load_id: int
    rank: int
    bytes: int
    pinned: bool
    live_requests: int
    idle: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[AdapterState, str]] = ..., load_id: _Optional[int] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., live_requests: _Optional[int] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
