"""Translates what holds the engine still between the wire and the engine."""

from __future__ import annotations

from core.errors import InvalidRequest
from core.types.control import Activity, Nap, WeightSource, WeightUpdate
from service.pb.slipstream.v1 import control_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2
from service.wire.generate import duration

ACTIVITIES = {
    Activity.SERVING: inference_pb2.SERVER_ACTIVITY_SERVING,
    Activity.PAUSED: inference_pb2.SERVER_ACTIVITY_PAUSED,
    Activity.REFUSING: inference_pb2.SERVER_ACTIVITY_REFUSING,
    Activity.ASLEEP: inference_pb2.SERVER_ACTIVITY_ASLEEP,
}

_ENDS = {pb.PAUSE_MODE_UNSPECIFIED: False, pb.PAUSE_MODE_WAIT: False, pb.PAUSE_MODE_END: True}


def ends_streams(request: pb.PauseRequest) -> bool:
    """Whether the pause ends streams. Raises InvalidRequest for a mode that is not known."""
    if request.mode not in _ENDS:
        raise InvalidRequest.of("mode", f"unknown mode {request.mode}")
    return _ENDS[request.mode]


def weight_source(request: pb.UpdateWeightsRequest) -> WeightSource:
    """Where the weights are. Raises InvalidRequest where neither is given."""
    if not (request.path or request.name):
        raise InvalidRequest.of("path", "set `path` or `name`")
    return WeightSource(request.path, request.name)


def update_response(update: WeightUpdate) -> pb.UpdateWeightsResponse:
    """What the update did."""
    return pb.UpdateWeightsResponse(
        weight_version=update.version,
        replaced_version=update.replaced,
        load=duration(update.load_seconds),
        held=duration(update.held_seconds),
        restarted_requests=update.restarted,
    )


def sleep_response(nap: Nap) -> pb.SleepResponse:
    """What was given back."""
    return pb.SleepResponse(freed_bytes=nap.freed_bytes, live_requests=nap.live_requests)
