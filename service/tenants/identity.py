"""The tenant of a call: the name of its token, else of its client certificate; and what is the tenant's own.

Request ids and cache salts are made the tenant's by a prefix with a NUL in it, which neither names nor ids can hold. So
nothing behind the service can confuse two: their ids are different ids. The engine gets the name as well, to share the
machine by.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from core.types.io import EmbedRequest, GenerateRequest
from service.auth import caller_name
from service.interceptors import Context
from service.permissions import is_public
from service.request_reads import address_of
from service.status import Unauthenticated
from service.tenants.names import is_name

Request = TypeVar("Request", GenerateRequest, EmbedRequest)

COMMON_NAME = "x509_common_name"
ALTERNATIVE_NAME = "x509_subject_alternative_name"


def caller_of(context: Context) -> str:
    """Whose share of the server a call uses: its tenant's, or without one that of the address it comes from."""
    return caller_name.get() or address_of(context.peer())


def of_caller(asked: Request, context: Context) -> Request:
    """`asked` as a request of the caller that it is served for."""
    return replace(asked, tenant=caller_of(context))


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


def certificate_name(properties: Mapping[str, Iterable[bytes]]) -> str | None:
    """The name in a verified client certificate: its common name, else its first alternative name.

    None without either, and for one that is not 1 to 256 printable ASCII characters: a NUL in a name could make one
    tenant look like another.
    """
    for key in (COMMON_NAME, ALTERNATIVE_NAME):
        for value in properties.get(key, ()):
            name = value.decode("utf-8", "replace")
            return name if is_name(name) else None
    return None


class CertificateNames:
    """Around a call on a server that asks for client certificates: those of `allowed` names may call, None: all.

    With `naming` the name is the caller's; without, a token says who calls, and the certificate only whether it may.
    """

    def __init__(self, allowed: frozenset[str] | None, *, naming: bool) -> None:
        self._allowed, self._naming = allowed, naming

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Raises Unauthenticated."""
        if not is_public(method):
            name = certificate_name(context.auth_context())
            if name is None and (self._naming or self._allowed is not None):
                raise Unauthenticated("the client certificate holds no name that can be used")
            if self._allowed is not None and name not in self._allowed:
                raise Unauthenticated("the name in the client certificate is not listed")
            if self._naming:
                caller_name.set(name)
        yield
