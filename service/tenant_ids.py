"""The names that tenants may have, and the request ids and cache salts that belong to a tenant.

An id or a salt gets the tenant's name and a NUL in front. Neither names nor client ids can hold a NUL, so ids of two
tenants are always different, and nothing behind the service can confuse them. The engine also gets the name by itself,
to share the machine between tenants.
"""

from __future__ import annotations

import re

MAX_NAME_CHARS = 256
NAME_RULE = f"1 to {MAX_NAME_CHARS} printable ASCII characters"
_NAME = re.compile(rf"[ -~]{{1,{MAX_NAME_CHARS}}}")


def is_name(given: str) -> bool:
    """Whether `given` keeps NAME_RULE: it is a label of metrics and part of ids, which a NUL or a surrogate breaks."""
    return _NAME.fullmatch(given) is not None


def scoped_id(request_id: str, caller: str | None) -> str:
    """The id by which the engine knows the request `request_id` of `caller`."""
    return request_id if caller is None else f"{caller}\0{request_id}"


def tenant_salt(salt: str, caller: str | None) -> str:
    """The engine's salt for `salt` of `caller`. Names hold no NUL, so no salt of one caller can look like another's."""
    return salt if caller is None else f"{caller}\0{salt}"


def tenant_of_id(request_id: str) -> str:
    """The tenant in an engine's id; empty where callers have no names."""
    return request_id.rpartition("\0")[0]


def public_id(request_id: str) -> str:
    """The client's id in an engine's id."""
    return request_id.rpartition("\0")[2]
