"""Which caller may call which method: a table of every method, and the permissions that a server's settings give.

A method that is not in the table is refused to every caller, so a new method of any dialect begins closed. A test
compares the table with the methods that servers register.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from core.types.constraint import ConstraintKind
from service.access.token_file import UNNAMED
from service.config.server_config import ANY_NAME, ServerConfig


class Permission(Enum):
    """What a caller needs to call a method."""

    PUBLIC = "public"
    """Nothing, not even a token: kubelets and load balancers have none, and ask whether the server is up."""
    CALL = "call"
    """A token or certificate, on a server that asks for them; else nothing."""
    OWN = "own"
    """A name: the method shows or changes what the server keeps of one tenant's prompts."""
    ADMIN = "admin"
    """A name that `--admins` lists: the method changes what other callers are served."""


def _methods(service: str, permission: Permission, names: str) -> dict[str, Permission]:
    return {f"/{service}/{name}": permission for name in names.split()}


_DIALECTS = ("sglang.grpc.scheduler.SglangScheduler", "vllm.grpc.engine.VllmEngine")
_INFERENCE = "Generate Attach Abort Embed Classify Score Tokenize Detokenize GetModelInfo GetServerInfo GetLoad"
_DIALECT = "Generate Embed Abort HealthCheck GetModelInfo GetServerInfo GetLoads GetTokenizer"

METHODS: Final[Mapping[str, Permission]] = MappingProxyType(
    {
        **_methods("grpc.health.v1.Health", Permission.PUBLIC, "Check List Watch"),
        **_methods("grpc.reflection.v1alpha.ServerReflection", Permission.CALL, "ServerReflectionInfo"),
        **_methods("slipstream.v1.InferenceService", Permission.CALL, _INFERENCE),
        **_methods("slipstream.v1.AdapterService", Permission.CALL, "ListAdapters"),
        **_methods("slipstream.v1.AdapterService", Permission.ADMIN, "LoadAdapter UnloadAdapter"),
        **_methods("slipstream.v1.ControlService", Permission.ADMIN, "Pause Resume UpdateWeights Sleep Wake"),
        **{name: each for one in _DIALECTS for name, each in _methods(one, Permission.CALL, _DIALECT).items()},
        **{
            name: each
            for one in _DIALECTS
            for name, each in _methods(one, Permission.OWN, "SubscribeKvEvents FlushCache").items()
        },
    }
)
"""By full method name."""

_UNNAMED: Final[Mapping[str, frozenset[Permission]]] = MappingProxyType(
    {
        "generate": frozenset({Permission.CALL}),
        "watch": frozenset({Permission.CALL, Permission.OWN}),
        "all": frozenset({Permission.CALL, Permission.OWN, Permission.ADMIN}),
    }
)
"""By value of `--unnamed-callers`."""


class Permissions:
    """What callers may do, by the settings of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._admins = config.admin_names
        self._unnamed = _UNNAMED[config.unnamed_callers]
        self._writers = config.grammar_writers

    def may(self, caller: str | None, permission: Permission) -> bool:
        """Whether `caller` may call methods that take `permission`."""
        if permission is Permission.PUBLIC:
            return True
        if caller is None or caller == UNNAMED:
            return permission in self._unnamed
        return permission is not Permission.ADMIN or caller in self._admins

    def may_constrain(self, caller: str | None, kind: ConstraintKind) -> bool:
        """Whether `caller` may constrain outputs in this form.

        Grammars (EBNF) are for callers that the operator names. A few characters of a grammar can hold any ambiguity,
        and its cost shows only while an output follows it.
        """
        if kind is not ConstraintKind.EBNF or ANY_NAME in self._writers:
            return True
        return caller is not None and caller != UNNAMED and caller in self._writers

    def sees_all(self, caller: str | None) -> bool:
        """Whether loads and flushes of `caller` are of all tenants: for admins, and for callers without names."""
        return caller is None or self.may(caller, Permission.ADMIN)


def is_public(method: str) -> bool:
    """Whether `method` asks for no token and no certificate's name."""
    return METHODS.get(method) is Permission.PUBLIC


def why_not(caller: str | None, permission: Permission | None) -> str:
    """The error text for a caller that lacks `permission`; None stands for a method that is not in METHODS."""
    if permission is None:
        return "no caller may call this method"
    if caller is None or caller == UNNAMED:
        return "callers without a name may not call this here; --unnamed-callers would open it to all of them"
    return "this caller may not call this; --admins lists those who may"
