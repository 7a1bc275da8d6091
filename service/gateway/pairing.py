"""What gateways say of prefill/decode disaggregation: which keys a request leaves, and which it goes on from.

vLLM's gateways ask one worker to prefill, and hand what it answers to the worker that decodes, word for word: the names
are vLLM's where it has one, the content is ours. SGLang's ask both at once, and draw the room themselves.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from core.disagg_config import MAX_PORT
from core.errors import InvalidRequest
from core.types.handover import Handed, HandOver, TakeOver
from core.types.io import ModelInfo

CONNECTOR = "NixlConnector"
"""vLLM's name of what relays an answer of one worker to the other. Gateways pair workers that have the same one, and
ask a worker to prefill for another only under a name that they know: else smg 1.13 sends no parameters at all."""
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PARAMS_JSON = "kv_transfer_params_json"
BOOTSTRAP = "disaggregated_params"
MAX_JSON = 4096
"""Characters."""
MAX_HOST = 253
MAX_NAME = 128

Handing = tuple[HandOver | None, TakeOver | None]


def read_json(text: str) -> Handing:
    """What `kv_transfer_params_json` of a request asks for; nothing if it is empty. Raises InvalidRequest."""
    if not text:
        return None, None
    try:
        if len(text) > MAX_JSON:
            raise ValueError(f"has more than {MAX_JSON} characters")
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(PARAMS_JSON, f"must be JSON: {error}") from None
    if not isinstance(said, dict):
        raise InvalidRequest.of(PARAMS_JSON, "must be a JSON object")
    decodes, prefills = said.get("do_remote_decode") is True, said.get("do_remote_prefill") is True
    if decodes == prefills:
        raise InvalidRequest.of(PARAMS_JSON, "must have either do_remote_decode or do_remote_prefill")
    if decodes:
        return HandOver(), None
    host, port, room, engine = (said.get(name) for name in ("remote_host", "remote_port", "room", "remote_engine_id"))
    if not (_is_name(host, MAX_HOST) and _is_port(port) and _is_name(room, MAX_NAME) and _is_name(engine, MAX_NAME)):
        raise InvalidRequest.of(PARAMS_JSON, "must be what a worker that prefills has answered")
    return None, TakeOver(host, port, room, engine)


def written(handed: Handed | None) -> str:
    """`kv_transfer_params_json` of a worker that has prefilled; empty where nothing is handed over."""
    if handed is None:
        return ""
    return json.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": handed.engine_id,
            "remote_host": handed.host,
            "remote_port": handed.port,
            "room": handed.room,
            "tokens": handed.tokens,
        }
    )


def read_bootstrap(message: Any, info: ModelInfo) -> Handing:
    """What `disaggregated_params` of a request to a worker of this role asks for. Raises InvalidRequest."""
    if not message.HasField(BOOTSTRAP):
        return None, None
    params = message.disaggregated_params
    if info.role == "both":
        raise InvalidRequest.of(BOOTSTRAP, "this server has no --role: it prefills and decodes itself")
    room = str(params.bootstrap_room)
    if info.role == "prefill":
        return HandOver(room), None
    if not (_is_name(params.bootstrap_host, MAX_HOST) and _is_port(params.bootstrap_port)):
        raise InvalidRequest.of(BOOTSTRAP, "must have bootstrap_host and bootstrap_port")
    return None, TakeOver(params.bootstrap_host, params.bootstrap_port, room)


def _is_name(value: Any, most: int) -> TypeGuard[str]:
    return isinstance(value, str) and 1 <= len(value) <= most and "\0" not in value


def _is_port(value: Any) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= MAX_PORT
