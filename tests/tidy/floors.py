"""The floors of the house: imports go down, and a few doors are the only way through.

The numbers are the tables of floors in `core/README.md` and `service/README.md`. Packages of one floor may import each
other as long as that makes no circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.tidy.imports import Import, imports, within
from tests.tidy.source import Source

FLOORS = {
    "core.types": 0,
    "core.config": 0,
    "core.model_config": 0,
    "core.disagg_config": 0,
    "core.nodes_config": 0,
    "core.secret_file": 0,
    "core.parent": 0,
    "core.setting": 0,
    "core.errors": 0,
    "core.invariants": 0,
    "core.machine": 0,
    "core.buggify": 0,
    "core.lanes": 0,
    "core.histogram": 0,
    "core.device": 1,
    "core.native": 1,
    "core.memory": 2,
    "core.prefix": 2,
    "core.disk": 2,
    "core.batch": 3,
    "core.relay": 4,
    "core.models": 5,
    "core.layers": 5,
    "core.attention": 5,
    "core.sampling": 5,
    "core.speculation": 5,
    "core.executor": 6,
    "core.distributed": 6,
    "core.scheduler": 7,
    "core.disagg": 7,
    "core.text": 7,
    "core.engine": 8,
    # The other half begins again at the ground: what it may see of core is `SERVICE_SEES`.
    "service.errors": 0,
    "service.tenant_ids": 0,
    "service.process": 0,
    "service.config": 0,
    "service.pb": 0,
    "service.engine": 1,
    "service.checkpoints": 2,
    "service.wire": 1,
    "service.page": 2,
    "service.metrics": 3,
    "service.rpc": 4,
    "service.access": 5,
    "service.tracing": 5,
    "service.limits": 6,
    "service.client": 6,
    "service.resume": 7,
    "service.calls": 8,
    "service.servicers": 9,
    "service.gateway": 9,
    "service.server": 10,
    "service.frontends": 11,
    "service.replicas": 12,
    "service.exported": 7,
    "service.cli": 13,
    "service.bench": 14,
    "service.__main__": 14,
}
HOUSES = ("core", "service")

OUTSIDE_CORE = (
    "service",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "prometheus_client",
    "opentelemetry",
    "asyncio_throttle",
)
NO_TORCH = (
    "core.types",
    "core.config",
    "core.model_config",
    "core.disagg_config",
    "core.nodes_config",
    "core.secret_file",
    "core.parent",
    "core.setting",
    "core.errors",
    "core.invariants",
    "core.machine",
    "core.buggify",
    "core.lanes",
    "core.histogram",
)
LIGHT = ("torch", "transformers", "tokenizers", "safetensors")

DOORS = (
    # (who, what it reaches for, the only modules of that through which it may)
    ("core.scheduler", "core.executor", ("core.executor.interface",)),
    ("core.disagg", "core.executor", ("core.executor.interface",)),
    ("core.executor", "core.models", ("core.models.base",)),
    ("core.executor", "core.attention", ("core.attention.base",)),
    ("core.text", "core", ("core.types", "core.config", "core.errors", "core.invariants", "core.text")),
)

SERVICE_SEES = (
    *(
        "core.engine",
        "core.types",
        "core.config",
        "core.model_config",
        "core.disagg_config",
        "core.setting",
        "core.errors",
        "core.buggify",
        "core.machine",
        "core.parent",
    ),
    *("core.lanes", "core.models.bundled"),
)
KNOWS_MESSAGES = (
    # `wire` makes of messages what is ours, and the other way round. What registers, answers and calls methods has them
    # in its signatures, and benchmarks call without the client.
    *("service.wire", "service.servicers", "service.server", "service.client", "service.bench", "service.pb"),
)
BENCH_SEES = (
    *SERVICE_SEES,
    # Benchmarks build the real scheduler around an emulated device, so they are let in behind the engine's door; of
    # models and attention they see the contracts that the emulation fulfils.
    "core.models.base",
    "core.attention.base",
    "core.text",
    "core.scheduler",
    "core.executor",
    "core.batch",
    "core.disagg",
    "core.memory",
    "core.prefix",
    "core.device",
    "core.invariants",
)


def package_of(module: str) -> str:
    """`core.memory.kv_pool` -> `core.memory`."""
    return ".".join(module.split(".")[:2])


def upward(sources: Iterable[Source]) -> list[str]:
    """Imports in a house that do not go down, and packages without a floor."""
    findings = []
    for source in sources:
        package = package_of(source.module)
        house = package.partition(".")[0]
        if package == house or house not in HOUSES:
            continue
        if package not in FLOORS:
            findings.append(source.at(1, f"{package} has no floor: add it to tests/tidy/floors.py"))
            continue
        for found in imports(source):
            other = package_of(found.target)
            if other in (house, package) or not within(other, house):
                continue
            if FLOORS.get(other, 99) > FLOORS[package]:
                findings.append(
                    source.at(found.line, f"{package} (F{FLOORS[package]}) imports {found.target}, above it")
                )
    return findings


def circles(sources: Iterable[Source]) -> list[str]:
    """Pairs of packages on one floor that need each other, directly or through others of that floor."""
    needs: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        package = package_of(source.module)
        for found in imports(source):
            other = package_of(found.target)
            if other != package and other in FLOORS and FLOORS[other] == FLOORS.get(package):
                needs[package].add(other)
    reached = {package: _closure(package, needs) for package in list(needs)}
    return [
        f"{package} and others of its floor import each other" for package in reached if package in reached[package]
    ]


def _closure(start: str, needs: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(needs[start])
    while waiting:
        package = waiting.pop()
        if package not in seen:
            seen.add(package)
            waiting.extend(needs.get(package, ()))
    return seen


def outside(sources: Iterable[Source]) -> list[str]:
    """What core must not import: the wire, metrics, `service`; and on its lowest floor, anything slow to load."""
    findings = []
    for source in sources:
        for found in imports(source):
            if not within(source.module, "core"):
                continue
            if any(within(found.target, name) for name in OUTSIDE_CORE):
                findings.append(source.at(found.line, f"core must not import {found.target}"))
            bare = any(within(source.module, name) for name in NO_TORCH)
            if bare and any(within(found.target, name) for name in LIGHT):
                findings.append(source.at(found.line, f"{source.module} must load without {found.target}"))
    return findings


def doors(sources: Iterable[Source]) -> list[str]:
    """Imports that go round a door of core."""
    findings = []
    for source in sources:
        for who, what, through in DOORS:
            if within(source.module, who):
                findings += [source.at(found.line, _round(found, through)) for found in _misses(source, what, through)]
    return findings


def service_doors(sources: Iterable[Source]) -> list[str]:
    """Imports of core by service that go round the engine, and of messages by rooms that know only what `wire` made."""
    findings = []
    for source in sources:
        if within(source.module, "service"):
            through = BENCH_SEES if within(source.module, "service.bench") else SERVICE_SEES
            findings += [source.at(found.line, _round(found, through)) for found in _misses(source, "core", through)]
            if not any(within(source.module, room) for room in KNOWS_MESSAGES):
                messages = [found for found in imports(source) if within(found.target, "service.pb")]
                findings += [
                    source.at(found.line, "protobuf messages are for `wire`, servicers and client")
                    for found in messages
                ]
    return findings


def _misses(source: Source, what: str, through: tuple[str, ...]) -> list[Import]:
    aimed = [found for found in imports(source) if within(found.target, what)]
    return [found for found in aimed if not any(within(found.target, door) for door in through)]


def _round(found: Import, through: tuple[str, ...]) -> str:
    return f"imports {found.target}, but may only see {', '.join(through)}"
