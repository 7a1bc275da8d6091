"""The tenant of a call: the name of its token, else of its client certificate; and what is the tenant's own.

Request ids and cache salts are made the tenant's by a prefix with a NUL in it, which neither names nor ids can hold. So
nothing behind the service knows of tenants, and nothing there can confuse two: their ids are different ids.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from service.auth import PUBLIC_SERVICES, caller_name
from service.interceptors import Context
from service.status import Unauthenticated

MAX_NAME_CHARS = 256
_NAME = re.compile(rf"[ -~]{{1,{MAX_NAME_CHARS}}}")

COMMON_NAME = "x509_common_name"
ALTERNATIVE_NAME = "x509_subject_alternative_name"


def scoped_id(request_id: str, caller: str | None) -> str:
    """`request_id` within what belongs to `caller`: what the engine knows the request by."""
    return request_id if caller is None else f"{caller}\0{request_id}"


def tenant_salt(salt: str, caller: str | None) -> str:
    """`salt` within what belongs to `caller`. Names hold no NUL, so no salt of one caller can look like another's."""
    return salt if caller is None else f"{caller}\0{salt}"


def public_id(request_id: str) -> str:
    """The id that the caller knows the request by."""
    return request_id.rpartition("\0")[2]


def certificate_name(properties: Mapping[str, Iterable[bytes]]) -> str | None:
    """The name in a verified client certificate: its common name, else its first alternative name.

    None without either, and for one that is not 1 to 256 printable ASCII characters: a NUL in a name could make one
    tenant look like another.
    """
    for key in (COMMON_NAME, ALTERNATIVE_NAME):
        for value in properties.get(key, ()):
            name = value.decode("utf-8", "replace")
            return name if _NAME.fullmatch(name) else None
    return None


@asynccontextmanager
async def named_by_certificate(method: str, context: Context) -> AsyncIterator[None]:
    """Around a call on a server that requires client certificates and no tokens. Raises Unauthenticated."""
    if method.strip("/").rpartition("/")[0] not in PUBLIC_SERVICES:
        name = certificate_name(context.auth_context())
        if name is None:
            raise Unauthenticated("the client certificate holds no name that can be used")
        caller_name.set(name)
    yield
