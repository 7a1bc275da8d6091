"""Every test here needs the gateway's messages; where they are not installed its file is skipped and says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

INSTALLED = find_spec("smg_grpc_proto") is not None


class Absent(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> NoReturn:
        """Skipped as a whole."""
        pytest.skip(
            "the gateway's messages are not installed: pip install 'slipstream[gateway]'", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """A file as usual, if it can be imported."""
    return None if INSTALLED else Absent.from_parent(parent, path=module_path)


@pytest.fixture(params=["sglang", "vllm"])
def spoken(request: pytest.FixtureRequest) -> Any:
    """Each dialect in turn."""
    from tests.contract.gateway.spoken import DIALECTS

    return next(each for each in DIALECTS if each.name == request.param)
