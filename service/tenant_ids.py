"""What is a tenant's own: the names that tenants may have, and request ids and cache salts within them.

Ids and salts are made the tenant's by a prefix with a NUL in it, which neither names nor ids can hold. So nothing
behind the service can confuse two: their ids are different ids. The engine gets the name as well, to share the machine
by.
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
    """`request_id` within what belongs to `caller`: what the engine knows the request by."""
    return request_id if caller is None else f"{caller}\0{request_id}"


def tenant_salt(salt: str, caller: str | None) -> str:
    """`salt` within what belongs to `caller`. Names hold no NUL, so no salt of one caller can look like another's."""
    return salt if caller is None else f"{caller}\0{salt}"


def tenant_of_id(request_id: str) -> str:
    """Whose request it is that the engine knows by this id; empty where callers have no names."""
    return request_id.rpartition("\0")[0]


def public_id(request_id: str) -> str:
    """The id that the caller knows the request by."""
    return request_id.rpartition("\0")[2]
