"""Imports go down only, and every rule about them can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.tidy import circles, floors
from tests.tidy.floors import FLOORS, HOUSES
from tests.tidy.source import Source, python, report

CORE, SERVICE = python("core"), python("service")


def one(path: str, text: str) -> list[Source]:
    return [Source(path, text)]


def test_imports_go_down() -> None:
    report(floors.upward([*CORE, *SERVICE]))


def test_packages_of_one_floor_make_no_circle() -> None:
    report(floors.circles([*CORE, *SERVICE]))


def test_no_files_import_each_other() -> None:
    report(circles.of_files([*CORE, *SERVICE]))


def test_core_knows_neither_the_wire_nor_metrics_and_its_lowest_floor_no_torch() -> None:
    report(floors.outside(CORE))


def test_core_goes_through_its_doors() -> None:
    report(floors.doors(CORE))


def test_service_sees_core_through_the_engine() -> None:
    report(floors.service_doors(SERVICE))


def test_every_floor_is_a_folder_or_file_that_can_exist() -> None:
    """A misspelt key of the table would let a package go unchecked."""
    present = {
        f"{house}.{path.stem}"
        for house in HOUSES
        for path in (ROOT / house).iterdir()
        if _is_package(path) or path.suffix == ".py"
    }
    assert present - {"core.__init__", "service.__init__"} <= set(FLOORS)


def test_service_has_few_loose_files() -> None:
    """A file beside the rooms is a room that was not thought of."""
    assert len(list((ROOT / "service").glob("*.py"))) <= 5


def _is_package(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


@pytest.mark.parametrize(
    "text",
    [
        "from core.relay import future_map",
        "from core.relay.future_map import FutureMap",
        "import core.engine.api",
        "def late():\n    from core.batch.result import StepResult",
        "if TYPE_CHECKING:\n    from core.scheduler.planner import Planner",
        "from ..relay import future_map",
        "from .. import relay",
        "import importlib\nimportlib.import_module('core.models.llama')",
        "from core import engine",
        "from core.nowhere import thing",
    ],
)
def test_upward_imports_are_found(text: str) -> None:
    assert floors.upward(one("core/memory/rows.py", text))


@pytest.mark.parametrize(
    "text", ["from core.errors import X", "from . import kv_pool", "from core.prefix.base import P"]
)
def test_downward_imports_are_fine(text: str) -> None:
    assert not floors.upward(one("core/memory/rows.py", text))


def test_relative_imports_of_a_package_count_from_itself() -> None:
    assert not floors.upward(one("core/memory/__init__.py", "from . import rows"))
    assert floors.upward(one("core/memory/__init__.py", "from ..relay import payload"))


def test_a_package_without_a_floor_is_found() -> None:
    assert floors.upward(one("core/attic/box.py", "x = 1"))
    assert floors.upward(one("service/attic.py", "x = 1"))


def test_service_has_floors_too() -> None:
    assert floors.upward(one("service/rpc/status.py", "from service.resume.kept import Reader"))
    assert floors.upward(one("service/page/feed.py", "from service.access import caller"))
    assert not floors.upward(one("service/server/server.py", "from service.rpc.status import status_of"))
    assert not floors.upward(one("service/rpc/status.py", "from core.engine.api import Engine"))


def test_circles_are_found() -> None:
    there = Source("core/models/base.py", "from core.attention.base import A")
    middle = Source("core/attention/base.py", "from core.layers.rope import R")
    back = Source("core/layers/rope.py", "import core.models.base")
    assert not floors.circles([there, middle])
    assert len(floors.circles([there, middle, back])) == 3


@pytest.mark.parametrize(
    "back",
    [
        "from core.device.recorder import Recorder",
        "from core.device import recorder",
        "import core.device.recorder",
        "def late():\n    from core.device.recorder import Recorder",
        "if TYPE_CHECKING:\n    from core.device.recorder import Recorder",
    ],
)
def test_circles_of_files_are_found(back: str) -> None:
    there = Source("core/device/recorder.py", "from core.device.streams import Event")
    middle = Source("core/device/streams.py", "from core.device.event import Event")
    (found,) = circles.of_files([there, middle, Source("core/device/event.py", back)])
    assert all(name in found for name in ("core.device.recorder", "core.device.streams", "core.device.event"))
    assert not circles.of_files([there, middle, Source("core/device/event.py", "from core.device import timer")])
    assert not circles.of_files([there, middle, Source("core/device/__init__.py", ""), Source("core/x.py", back)])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/engine/build.py", "import grpc"),
        ("core/engine/build.py", "from grpc.aio import server"),
        ("core/engine/build.py", "from grpc_health.v1 import health"),
        ("core/scheduler/intake.py", "import asyncio_throttle"),
        ("core/device/checks.py", "from prometheus_client import Counter"),
        ("core/text/stop.py", "from service.wire.generate import x"),
        ("core/types/io.py", "import torch"),
        ("core/config.py", "from torch import Tensor"),
        ("core/errors.py", "import transformers"),
    ],
)
def test_libraries_on_the_wrong_floor_are_found(path: str, text: str) -> None:
    assert floors.outside(one(path, text))
    assert not floors.outside(one("core/models/base.py", "import torch"))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/scheduler/scheduler.py", "from core.executor.forward_thread import ForwardThread"),
        ("core/scheduler/scheduler.py", "from core.executor import Inline"),
        ("core/disagg/decode.py", "import core.executor.step"),
        ("core/executor/model_runner.py", "from core.models.llama import Llama"),
        ("core/executor/model_runner.py", "from core.attention.cpu import CpuBackend"),
        ("core/text/stop.py", "from core.scheduler.intake import Intake"),
    ],
)
def test_ways_round_a_door_are_found(path: str, text: str) -> None:
    assert floors.doors(one(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/scheduler/scheduler.py", "from core.executor.interface import Executor"),
        ("core/scheduler/scheduler.py", "from core.executor import interface"),
        ("core/executor/model_runner.py", "from core.models.base import Model"),
        ("core/text/stop.py", "from core.errors import InvalidRequest"),
    ],
)
def test_doors_are_open(path: str, text: str) -> None:
    assert not floors.doors(one(path, text))


def test_service_rules_can_fail_and_bench_may_see_more() -> None:
    text = "from core.scheduler.scheduler import Scheduler"
    assert floors.service_doors(one("service/servicers/inference.py", text))
    assert not floors.service_doors(one("service/bench/overlap.py", text))
    assert floors.service_doors(one("service/bench/overlap.py", "from core.models.registry import build_model"))
    assert not floors.service_doors(one("service/cli/cli.py", "from core.models.bundled import bundled_model_dir"))
    message = "from service.pb.slipstream.v1 import inference_pb2"
    assert floors.service_doors(one("service/calls/open_calls.py", message))
    assert not floors.service_doors(one("service/wire/generate.py", message))
