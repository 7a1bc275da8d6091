"""The step and the attention backends under PyTorch's CUDA stream sanitizer, in a process of its own.

The sanitizer sees what the thread that imported PyTorch submits, so what runs there drives the step from that thread:
launches still overlap results, but no forward thread of ours takes part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.gpu.cuda import ONLY_ON_CUDA
from tests.support.repository import ROOT

pytestmark = ONLY_ON_CUDA


CLEAN = ["tests/gpu/test_steps_cuda.py", "tests/unit/core/attention/test_conformance.py"]

PLANTED = """
import torch
from core.device.streams import DeviceStreams
streams = DeviceStreams(torch.device("cuda"))
with streams.on_forward():
    made = torch.ones(1000, device="cuda") * 2
with streams.on_copy():
    made.add_(1)
torch.cuda.synchronize()
"""


def sanitized(*command: str) -> subprocess.CompletedProcess[str]:
    # Compiled code bypasses the dispatcher, which is where the sanitizer looks.
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("module", CLEAN)
def test_the_sanitizer_finds_nothing(module: str) -> None:
    # Copies to the host read places of a pool that are leased, while steps write others: it knows whole tensors alone.
    done = sanitized("-m", "pytest", "-q", "-x", "--no-decoder", "-k", "not threads and not rejoin", module)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "CSAN" not in output, output[-4000:]


def test_the_sanitizer_would_find_a_missing_wait() -> None:
    done = sanitized("-c", PLANTED)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "CSAN" in output, output[-4000:]


KERNELS = "triton and (formula[triton-4-gqa] or formula[triton-4-latent-window] or formula[triton-4-bf16] or padded)"


@pytest.mark.timeout(1000)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs NVIDIA's compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_compute_sanitizer_finds_nothing_in_our_kernels(tool: str) -> None:
    # PyTorch's allocator hands out pieces of large blocks, in which no access is out of bounds for the tool.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "86",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-decoder",
    ]
    done = subprocess.run(
        [*command, "tests/unit/core/attention/test_conformance.py", "-k", KERNELS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
