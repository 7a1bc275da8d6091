"""The name of a caller in its client certificate, and which names may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from service.access.caller import caller_name
from service.access.permissions import is_public
from service.errors import Unauthenticated
from service.rpc.interceptors import Context
from service.tenant_ids import is_name

COMMON_NAME = "x509_common_name"
ALTERNATIVE_NAME = "x509_subject_alternative_name"


def certificate_name(properties: Mapping[str, Iterable[bytes]]) -> str | None:
    """The name in a verified client certificate: its common name, else its first alternative name.

    None if it has neither, or if the name is not 1 to 256 printable ASCII characters: a NUL in a name could make one
    tenant look like another.
    """
    for key in (COMMON_NAME, ALTERNATIVE_NAME):
        for value in properties.get(key, ()):
            name = value.decode("utf-8", "replace")
            return name if is_name(name) else None
    return None


class CertificateNames:
    """Refuses calls by the name in their client certificate, on a server that asks for certificates.

    Only `allowed` names may call; None allows every name. With `naming` the name in the certificate becomes the
    caller's name. Without it the token names the caller, and the certificate only says whether it may call.
    """

    def __init__(self, allowed: frozenset[str] | None, *, naming: bool) -> None:
        self._allowed, self._naming = allowed, naming

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """Run a call inside. Raises Unauthenticated for a missing or refused name; public methods need none."""
        if not is_public(method):
            name = certificate_name(context.auth_context())
            if name is None and (self._naming or self._allowed is not None):
                raise Unauthenticated("the client certificate holds no name that can be used")
            if self._allowed is not None and name not in self._allowed:
                raise Unauthenticated("the name in the client certificate is not listed")
            if self._naming:
                caller_name.set(name)
        yield
